"""What each rank of the tests of mcr_dl does. Every result is compared in every byte."""

import functools
import operator
import os
import random

import mcr_dl
from mcr_tensors import MOVED, REDUCED, Made, value, values

OP = mcr_dl.ReduceOp
COUNTS = [0, 1, 7, 600]
JOINED = {
    OP.SUM: operator.add,
    OP.PRODUCT: operator.mul,
    OP.MIN: min,
    OP.MAX: max,
    OP.BAND: operator.and_,
    OP.BOR: operator.or_,
    OP.BXOR: operator.xor,
}

# So many nodes share the ranks out.
if "MCR_NODES" in os.environ:
    os.environ["NCCL_HOSTID"] = f"node{int(os.environ['RANK']) % int(os.environ['MCR_NODES'])}"


def begin(backends=("nccl", "gloo"), **options):
    """Makes backends; rank and number of ranks."""
    mcr_dl.init(list(backends), timeout=60, **options)
    return mcr_dl.get_rank(), mcr_dl.get_size()


def both_ways(call):
    """Makes a call that returns when it has ended, and one that is waited for; `call(async_op)` prepares and checks."""
    for later in (False, True):
        call(later)


def done(work, later):
    assert (work is not None) == later, work
    if later:
        assert work.wait() and work.is_completed() and work.is_success()


def joined(op, size, count, first=0):
    return [functools.reduce(JOINED[op], [value(r, first + at) for r in range(size)]) for at in range(count)]


def reductions():
    """all_reduce, reduce and reduce_scatter: all types and operations."""
    rank, size = begin()
    for kind in REDUCED:
        is_whole = "int" in kind[1]
        for op in [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, *((OP.BAND, OP.BOR, OP.BXOR) if is_whole else ())]:
            for count in COUNTS if op == OP.SUM else [7]:
                for backend in ("nccl", "auto") if count == 7 else ("gloo",):
                    both_ways(functools.partial(_reduction, rank, size, backend, kind, op, count))
    mcr_dl.finalize()


def _reduction(rank, size, backend, kind, op, count, later):
    what, sums = f"{backend} {op} {count}", joined(op, size, count)
    made = Made(kind, values(rank, count))
    done(mcr_dl.all_reduce(backend, made.tensor, op, async_op=later), later)
    made.expect(sums, f"all_reduce {what}")
    for root in {0, size - 1}:
        made = Made(kind, values(rank, count))
        done(mcr_dl.reduce(backend, made.tensor, root, op, later), later)
        made.expect(sums if rank == root else values(rank, count), f"reduce {what}")
    sums, mine = joined(op, size, size * count), values(rank, size * count)
    made, source = Made(kind, [1] * count), Made(kind, mine)
    done(mcr_dl.reduce_scatter(backend, made.tensor, None, op, later, input=source.tensor), later)
    made.expect(sums[rank * count : (rank + 1) * count], f"reduce_scatter {what}")
    source.expect(mine, f"the input of reduce_scatter {what}")
    made = Made(kind, mine)
    done(mcr_dl.reduce_scatter(backend, made.tensor, 0, op, later), later)
    got = mine[: rank * count] + sums[rank * count : (rank + 1) * count] + mine[(rank + 1) * count :]
    made.expect(got, f"reduce_scatter in place {what}")


def special_reductions():
    """Averages, and reductions of bool and of complex numbers."""
    rank, size = begin()
    for kind in [("numpy", "float32"), ("torch", "float64"), ("torch", "float16")]:
        made = Made(kind, [60 * v for v in values(rank, 9)])
        mcr_dl.all_reduce("nccl", made.tensor, OP.AVG)
        made.expect([60 * s // size for s in joined(OP.SUM, size, 9)], "average")
    bits = [[v % 2 for v in values(r, 20)] for r in range(size)]
    for op, join in ((OP.SUM, any), (OP.MAX, any), (OP.BOR, any), (OP.PRODUCT, all), (OP.MIN, all), (OP.BAND, all)):
        for library in ("numpy", "torch"):
            made = Made((library, "bool"), bits[rank])
            mcr_dl.all_reduce("auto", made.tensor, op)
            made.expect([int(join(column)) for column in zip(*bits)], f"bool {op}")
    for kind in (("numpy", "complex64"), ("numpy", "complex128"), ("torch", "complex64")):
        made = Made(kind, [v + 2j * v for v in values(rank, 9)])
        mcr_dl.all_reduce("nccl", made.tensor)
        made.expect([s + 2j * s for s in joined(OP.SUM, size, 9)], "complex sum")
    mcr_dl.finalize()


def moves():
    """Collectives that move equal blocks, and messages: all types."""
    rank, size = begin()
    for kind in MOVED:
        for count in COUNTS:
            for backend in ("nccl", "auto", "@tcp") if count == 7 else ("nccl",):
                both_ways(functools.partial(_moves, rank, size, backend, kind, count))
    mcr_dl.finalize()


def _moves(rank, size, backend, kind, count, later):
    what, mine = f"{backend} {count} later={later}", values(rank, count)
    everyone = [v for r in range(size) for v in values(r, count)]
    made, source = Made(kind, [1] * (size * count)), Made(kind, mine)
    done(mcr_dl.all_gather(backend, made.tensor, source.tensor, later), later)
    made.expect(everyone, f"all_gather {what}")
    source.expect(mine, f"the input of all_gather {what}")
    made, source = Made(kind, [1] * (size * count)), Made(kind, values(rank, size * count))
    done(mcr_dl.all_to_all_single(backend, made.tensor, source.tensor, later), later)
    made.expect([v for r in range(size) for v in values(r, count, rank * count)], f"all_to_all_single {what}")
    source.expect(values(rank, size * count), f"the input of all_to_all_single {what}")
    for root in {0, size - 1}:
        made = Made(kind, mine)
        done(mcr_dl.bcast(backend, made.tensor, root, later), later)
        made.expect(values(root, count), f"bcast {what}")
        _gather_scatter(rank, size, backend, kind, count, root, later, what)
    outputs = [Made(kind, [1] * ((rank + r) % 3 * count)) for r in range(size)]
    inputs = [Made(kind, values(rank, (rank + r) % 3 * count, r)) for r in range(size)]
    done(mcr_dl.all_to_all(backend, [m.tensor for m in outputs], [m.tensor for m in inputs], later), later)
    for r, made in enumerate(outputs):
        made.expect(values(r, (rank + r) % 3 * count, rank), f"all_to_all {what}")
    if "@" not in backend and size > 1:
        made, source = Made(kind, [1] * count), Made(kind, mine)
        if later:
            works = [mcr_dl.send(backend, source.tensor, (rank + 1) % size, True)]
            works.append(mcr_dl.recv(backend, made.tensor, (rank - 1) % size, async_op=True))
            [work.wait() for work in works]
        elif rank == 0:
            mcr_dl.send(backend, source.tensor, 1)
            mcr_dl.recv(backend, made.tensor, size - 1)
        else:
            mcr_dl.recv(backend, made.tensor, rank - 1)
            mcr_dl.send(backend, source.tensor, (rank + 1) % size)
        made.expect(values((rank - 1) % size, count), f"message {what}")


def _gather_scatter(rank, size, backend, kind, count, root, later, what):
    mine, is_root = values(rank, count), rank == root
    everyone = [v for r in range(size) for v in values(r, count)]
    # In place.
    sent = [1] * (rank * count) + mine + [1] * ((size - rank - 1) * count) if is_root else mine
    made = Made(kind, sent)
    done(mcr_dl.gather(backend, made.tensor, root, later), later)
    made.expect(everyone if is_root else mine, f"gather in place {what}")
    made = Made(kind, everyone if is_root else [1] * count)
    done(mcr_dl.scatter(backend, made.tensor, root, later), later)
    made.expect(everyone if is_root else mine, f"scatter in place {what}")
    # From one tensor to another.
    made, source = Made(kind, [1] * (size * count)), Made(kind, mine)
    done(mcr_dl.gather(backend, made.tensor if is_root else None, root, later, input=source.tensor), later)
    made.expect(everyone if is_root else [1] * (size * count), f"gather {what}")
    made, source = Made(kind, [1] * count), Made(kind, everyone)
    done(mcr_dl.scatter(backend, made.tensor, root, later, input=source.tensor if is_root else None), later)
    made.expect(mine, f"scatter {what}")


def vectored():
    """Blocks of different sizes, some of them empty, packed or with gaps, all from seeds that the ranks share."""
    rank, size = begin()
    for seed in range(40):
        shared = random.Random(seed)
        kind, later = shared.choice(MOVED), shared.random() < 0.5
        backend = shared.choice(["nccl", "gloo", "auto", "@tcp"])
        longest = shared.choice([0, 3, 50, 3000])
        sizes = [[shared.choice([0, shared.randint(0, longest)]) for _ in range(size)] for _ in range(size)]
        what = f"seed {seed}, {backend}, later={later}"
        _all_to_allv(shared, rank, size, backend, kind, sizes, later, what)
        _gatherv(shared, rank, size, backend, kind, sizes[0], later, what)
    mcr_dl.finalize()


def _placed(shared, counts):
    """Displacements with gaps, not in order; or packed, where None says so."""
    order, at, places = list(range(len(counts))), 0, [0] * len(counts)
    gaps = [shared.randint(0, 2) for _ in counts]
    is_packed = shared.random() < 0.4
    if not is_packed:
        shared.shuffle(order)
    for r in order:
        at += 0 if is_packed else gaps[r]
        places[r] = at
        at += counts[r]
    return places, (None if is_packed else places), at + (0 if is_packed else 1)


def _filled(total, places, counts, block_of, other):
    """A buffer with these blocks, and `other` between them."""
    whole = [other] * total
    for r, (at, count) in enumerate(zip(places, counts)):
        whole[at : at + count] = block_of(r)
    return whole


def _all_to_allv(shared, rank, size, backend, kind, sizes, later, what):
    sends = [_placed(shared, sizes[r]) for r in range(size)][rank]
    recvs = [_placed(shared, [sizes[s][r] for s in range(size)]) for r in range(size)][rank]
    scounts, rcounts = sizes[rank], [sizes[s][rank] for s in range(size)]
    source = Made(kind, _filled(sends[2], sends[0], scounts, lambda r: values(rank, scounts[r], r), 2))
    made = Made(kind, [2] * recvs[2])
    done(mcr_dl.all_to_allv(backend, made.tensor, source.tensor, scounts, rcounts, sends[1], recvs[1], later), later)
    made.expect(_filled(recvs[2], recvs[0], rcounts, lambda r: values(r, rcounts[r], rank), 2), f"all_to_allv {what}")


def _gatherv(shared, rank, size, backend, kind, counts, later, what):
    places, displs, total = _placed(shared, counts)
    root, in_place = shared.randrange(size), shared.random() < 0.5
    mine, is_root = values(rank, counts[rank], 5), rank == root
    everyone = _filled(total, places, counts, lambda r: values(r, counts[r], 5), 2)
    own = _filled(total, places, counts, lambda r: mine if r == rank else [2] * counts[r], 2)
    made, source = Made(kind, own if in_place else [2] * total), Made(kind, mine)
    given = {} if in_place else {"input": source.tensor}
    done(mcr_dl.all_gatherv(backend, made.tensor, 0, counts, displs, later, **given), later)
    made.expect(everyone, f"all_gatherv {what}")
    # What is the root's alone other ranks may give, or not.
    known = counts if is_root or shared.random() < 0.5 else None
    made = Made(kind, (own if is_root else mine) if in_place else [2] * total)
    given = {} if in_place else {"input": source.tensor}
    target = made.tensor if is_root or in_place else None
    done(mcr_dl.gatherv(backend, target, root, known, displs, later, **given), later)
    left = mine if in_place else [2] * total
    made.expect(everyone if is_root else left, f"gatherv {what}")
    whole = Made(kind, everyone)
    made = Made(kind, [2] * counts[rank])
    if in_place:
        target = whole if is_root else made
        done(mcr_dl.scatterv(backend, target.tensor, root, known, displs, later), later)
    else:
        given = whole.tensor if is_root else None
        done(mcr_dl.scatterv(backend, made.tensor, root, known, displs, later, input=given), later)
    whole.expect(everyone, f"the root's tensor of scatterv {what}")
    if not (in_place and is_root):
        made.expect(mine, f"scatterv {what}")


def repeated():
    """Each function again and again on the same tensors, whose contents change; on two backends and with two roots in turn."""
    rank, size = begin()
    for kind in (("numpy", "float32"), ("torch", "float64"), ("torch", "int32"), ("dlpack", "int16")):
        tensors = {count: [Made(kind, [1] * count) for _ in range(2)] for count in (5, 5 * size)}
        for turn in range(6):
            backend, root = ("nccl", "gloo")[turn % 2], (0, size - 1)[turn // 2 % 2]
            what = f"turn {turn} of {kind}"
            (part, other), (whole, source) = tensors[5], tensors[5 * size]
            ours = [values(r, 5 * size, 2 * turn) for r in range(size)]
            mine = ours[rank]

            def sums(op):
                return [functools.reduce(JOINED[op], column) for column in zip(*ours)]

            part.fill(mine[:5])
            mcr_dl.bcast(backend, part.tensor, root)
            part.expect(ours[root][:5], f"bcast, {what}")
            for op in (OP.SUM, OP.MAX):
                part.fill(mine[:5])
                mcr_dl.reduce(backend, part.tensor, root, op)
                part.expect(sums(op)[:5] if rank == root else mine[:5], f"reduce, {what}")
                part.fill(mine[:5])
                mcr_dl.all_reduce(backend, part.tensor, op)
                part.expect(sums(op)[:5], f"all_reduce, {what}")
                source.fill(mine)
                mcr_dl.reduce_scatter(backend, part.tensor, None, op, input=source.tensor)
                part.expect(sums(op)[5 * rank : 5 * rank + 5], f"reduce_scatter, {what}")
                mcr_dl.reduce_scatter(backend, source.tensor, None, op)
                source.expect(mine[: 5 * rank] + sums(op)[5 * rank : 5 * rank + 5] + mine[5 * rank + 5 :], f"reduce_scatter in place, {what}")
            other.fill(mine[:5])
            mcr_dl.all_gather(backend, whole.tensor, other.tensor)
            whole.expect([v for r in range(size) for v in ours[r][:5]], f"all_gather, {what}")
            source.fill(mine)
            mcr_dl.all_to_all_single(backend, whole.tensor, source.tensor)
            whole.expect([v for r in range(size) for v in ours[r][5 * rank : 5 * rank + 5]], f"all_to_all_single, {what}")
    mcr_dl.finalize()
