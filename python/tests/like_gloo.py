"""Every collective with every type and operation, on Strata's group and on gloo's in one process: equal results.

What gloo refuses is compared with nothing, but must not end or stop the process on Strata either. Shapes are random under
a seed.
"""

import gc
import random

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
BYTES_ONLY = [torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2]
TYPES = [*FLOATS, *WHOLE, torch.bool, *COMPLEX]
OPERATIONS = [
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
]
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


class Case:
    """Two groups of the same ranks, and random numbers that all ranks share."""

    def __init__(self, seed):
        dist.init_process_group("gloo")
        self.gloo = dist.group.WORLD
        self.strata = dist.new_group(backend="strata")
        # Nothing in Python holds the group's backend.
        gc.collect()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shared = random.Random(seed)
        self.own = torch.Generator().manual_seed(seed * 1000 + self.rank)
        self.compared = self.alone = self.refused = 0

    def shape(self):
        return [self.shared.randint(1, 7) for _ in range(self.shared.randint(1, 3))]

    def tensor(self, shape, dtype):
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self.own).bool()
        if dtype.is_complex:
            parts = torch.randn([*shape, 2], generator=self.own, dtype=torch.float64)
            return torch.view_as_complex(parts).to(dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.own).to(dtype)
        return torch.randint(0, 8, shape, generator=self.own).to(dtype)

    def compare(self, what, call, inputs, exact=True):
        """`call(group, *copies)` gives the tensors to compare."""

        def on(group):
            def copy(item):
                return [copy(part) for part in item] if isinstance(item, list) else item.clone()

            try:
                return call(group, *[copy(item) for item in inputs]), None
            except Exception as error:
                return None, error

        expected, gloo_error = on(self.gloo)
        got, error = on(self.strata)
        if error is not None:
            # What PyTorch itself refuses, it refuses for both.
            named = f"rank {self.rank} of {self.size}" in str(error) or str(error) == str(gloo_error)
            assert named, f"{what}: the error names no rank: {error}"
            assert gloo_error is not None, f"{what}: gloo has it, Strata says {error!r}"
            self.refused += 1
            return
        if gloo_error is not None:
            self.alone += 1
            return
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, what
            tolerance = TOLERANCE.get(mine.dtype, 1e-12)
            same = _bits(mine, theirs) if exact or not (mine.is_floating_point() or mine.is_complex()) else None
            close = same if same is not None else torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
            assert close, f"{what}: rank {self.rank}: {mine} is not {theirs}"
        self.compared += 1


def _bits(one, other):
    is_bool = one.dtype is torch.bool
    if one.numel() == 0:
        return True
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    # Gloo adds up bools as numbers, and leaves 2 for "true".
    return torch.equal(one != 0, other != 0) if is_bool else torch.equal(one, other)


def _waited(work, results, asynchronous):
    if asynchronous:
        work.wait()
    return results


def reductions(seed):
    case = Case(int(seed))
    for dtype in TYPES:
        for op in OPERATIONS:
            _reductions_of(case, dtype, op)
    _end(case)


def _reductions_of(case, dtype, op):
    exact = case.size == 2 and op != ReduceOp.AVG
    later = case.shared.random() < 0.5
    shape, size = case.shape(), case.size
    root = case.shared.randrange(size)
    what = f"{dtype} {op} {shape} later={later}"
    data = case.tensor(shape, dtype)

    def strided(group, tensor):
        # Gloo reads the memory of such a tensor as if it were in order, so it gets a plain one.
        view = tensor if group is case.gloo else tensor.mT.contiguous().mT
        work = dist.all_reduce(view, op, group=group, async_op=later)
        return _waited(work, [view], later)

    def all_reduce(group, tensor):
        return _waited(dist.all_reduce(tensor, op, group=group, async_op=later), [tensor], later)

    def reduce(group, tensor):
        work = dist.reduce(tensor, root, op, group=group, async_op=later)
        return _waited(work, [tensor] if case.rank == root else [], later)

    def reduce_scatter(group, *parts):
        output = torch.empty_like(parts[0])
        return _waited(dist.reduce_scatter(output, list(parts), op, group=group, async_op=later), [output], later)

    def reduce_scatter_single(group, tensor):
        output = torch.empty(shape, dtype=dtype)
        work = dist.reduce_scatter_tensor(output, tensor, op, group=group, async_op=later)
        return _waited(work, [output], later)

    case.compare(f"all_reduce {what}", all_reduce, [data], exact)
    if len(shape) > 1:
        case.compare(f"strided all_reduce {what}", strided, [data], exact)
    case.compare(f"reduce {what}", reduce, [data], exact)
    case.compare(f"reduce_scatter {what}", reduce_scatter, [case.tensor(shape, dtype) for _ in range(size)], exact)
    case.compare(
        f"reduce_scatter_single {what}", reduce_scatter_single, [case.tensor([size * shape[0], *shape[1:]], dtype)], exact
    )


def moves(seed):
    case = Case(int(seed))
    for dtype in [*TYPES, *BYTES_ONLY]:
        for round_ in range(4):
            _moves_of(case, dtype, round_ % 2 == 1)
    _end(case)


def _moves_of(case, dtype, later):
    shape, size, rank = case.shape(), case.size, case.rank
    root = case.shared.randrange(size)
    what = f"{dtype} {shape} root={root} later={later}"
    data = case.tensor(shape, dtype)

    def empties():
        return [torch.zeros(shape, dtype=dtype) for _ in range(size)]

    def broadcast(group, tensor):
        return _waited(dist.broadcast(tensor, root, group=group, async_op=later), [tensor], later)

    def all_gather(group, tensor):
        outputs = empties()
        return _waited(dist.all_gather(outputs, tensor, group=group, async_op=later), outputs, later)

    def all_gather_single(group, tensor):
        output = torch.zeros([size * shape[0], *shape[1:]], dtype=dtype)
        work = dist.all_gather_into_tensor(output, tensor, group=group, async_op=later)
        return _waited(work, [output], later)

    def gather(group, tensor):
        outputs = empties() if rank == root else None
        work = dist.gather(tensor, outputs, root, group=group, async_op=later)
        return _waited(work, outputs or [], later)

    def scatter(group, tensor, parts):
        work = dist.scatter(tensor, parts if rank == root else None, root, group=group, async_op=later)
        return _waited(work, [tensor], later)

    def all_to_all_single(group, tensor):
        output = torch.zeros_like(tensor)
        return _waited(dist.all_to_all_single(output, tensor, group=group, async_op=later), [output], later)

    rows = [[case.shared.randint(0, 3) for _ in range(size)] for _ in range(size)]
    sent, received = rows[rank], [row[rank] for row in rows]

    def uneven(group, tensor):
        output = torch.zeros([sum(received), *shape[1:]], dtype=dtype)
        work = dist.all_to_all_single(output, tensor, received, sent, group=group, async_op=later)
        return _waited(work, [output], later)

    def all_to_all(group, parts):
        outputs = empties()
        return _waited(dist.all_to_all(outputs, parts, group=group, async_op=later), outputs, later)

    def ring(group, tensor):
        output, right, left = torch.zeros_like(tensor), (rank + 1) % size, (rank - 1) % size
        works = [dist.isend(tensor, right, group=group, tag=7), dist.irecv(output, left, group=group, tag=7)]
        [work.wait() for work in works]
        return [output]

    def batch(group, tensor):
        output, right, left = torch.zeros_like(tensor), (rank + 1) % size, (rank - 1) % size
        ops = [dist.P2POp(dist.isend, tensor, right, group), dist.P2POp(dist.irecv, output, left, group)]
        [work.wait() for work in dist.batch_isend_irecv(ops)]
        return [output]

    case.compare(f"broadcast {what}", broadcast, [data])
    case.compare(f"all_gather {what}", all_gather, [data])
    case.compare(f"all_gather_single {what}", all_gather_single, [data])
    case.compare(f"gather {what}", gather, [data])
    case.compare(f"scatter {what}", scatter, [data, [case.tensor(shape, dtype) for _ in range(size)]])
    case.compare(f"all_to_all_single {what}", all_to_all_single, [case.tensor([2 * size, *shape[1:]], dtype)])
    case.compare(f"uneven all_to_all_single {what}", uneven, [case.tensor([sum(sent), *shape[1:]], dtype)])
    # Gloo takes lists of equal sizes only.
    case.compare(f"all_to_all {what}", all_to_all, [[case.tensor(shape, dtype) for _ in sent]])
    case.compare(f"isend and irecv {what}", ring, [data])
    case.compare(f"batch_isend_irecv {what}", batch, [data])


def others(seed):
    """Coalescing, objects, lists, split groups and functional collectives."""
    import torch.distributed._functional_collectives as functional

    case = Case(int(seed))
    size, rank = case.size, case.rank

    def coalesced_reduce(group, one, two):
        with dist._coalescing_manager(group):
            dist.all_reduce(one, group=group)
            dist.all_reduce(two, group=group)
        return [one, two]

    def coalesced_gather(group, one, two):
        outputs = [torch.zeros(size * 3), torch.zeros(size * 5)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            dist.all_gather_into_tensor(outputs[0], one, group=group)
            dist.all_gather_into_tensor(outputs[1], two, group=group)
        manager.wait()
        return outputs

    def coalesced_scatter(group, one):
        outputs = [torch.zeros(2), torch.zeros(2)]
        with dist._coalescing_manager(group):
            dist.reduce_scatter_tensor(outputs[0], one, group=group)
            dist.reduce_scatter_tensor(outputs[1], one + 1, group=group)
        return outputs

    def gather_coalesced(group, one, two):
        outputs = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
        dist.all_gather_coalesced(outputs, [one, two], group=group)
        return [tensor for row in outputs for tensor in row]

    def in_functions(group, one):
        total = functional.all_reduce(one, "sum", group)
        joined = functional.all_gather_tensor(total, 0, group)
        return [functional.reduce_scatter_tensor(joined, "sum", 0, group) + 0]

    def objects(group):
        every = [None] * size
        dist.all_gather_object(every, {"rank": rank, "text": "x" * (rank + 1)}, group=group)
        gathered = [None] * size if rank == 0 else None
        dist.gather_object(rank * 2, gathered, 0, group=group)
        told = ["a", 7] if rank == 0 else [None, None]
        dist.broadcast_object_list(told, 0, group=group)
        mine = [None]
        dist.scatter_object_list(mine, [str(r) for r in range(size)] if rank == 0 else None, 0, group=group)
        assert every == [{"rank": r, "text": "x" * (r + 1)} for r in range(size)]
        assert gathered is None or gathered == [2 * r for r in range(size)]
        assert told == ["a", 7] and mine == [str(rank)]
        if rank == 0:
            dist.send_object_list([1, "two"], 1, group=group)
        if rank == 1:
            got = [None, None]
            dist.recv_object_list(got, 0, group=group)
            assert got == [1, "two"]
        return []

    def reduce_coalesced(group, one, two):
        dist.all_reduce_coalesced([one, two], dist.ReduceOp.MAX, group=group)
        return [one, two]

    def barrier(group):
        dist.barrier(group=group)
        dist.barrier(group=group, async_op=True).wait()
        return []

    def one_after_another(group, tensor):
        """Messages that wait: even ranks send first."""
        output, right, left = torch.zeros_like(tensor), (rank + 1) % size, (rank - 1) % size
        steps = [lambda: dist.send(tensor, right, group=group), lambda: dist.recv(output, left, group=group)]
        [step() for step in (steps if rank % 2 == 0 else reversed(steps))]
        return [output]

    def empty(group, nothing):
        parts = [torch.zeros(0, 2) for _ in range(size)]
        dist.all_reduce(nothing, group=group)
        dist.broadcast(nothing, 0, group=group)
        dist.all_gather(parts, nothing, group=group)
        whole = torch.zeros(0, 2)
        dist.all_to_all_single(whole, nothing, [0] * size, [0] * size, group=group)
        return [nothing, *parts, whole]

    one, two = case.tensor([3], torch.float32), case.tensor([5], torch.float32)
    case.compare("all_reduce_coalesced", reduce_coalesced, [one, two])
    case.compare("barrier", barrier, [])
    case.compare("send and recv", one_after_another, [one])
    case.compare("nothing", empty, [torch.zeros(0, 2)])
    case.compare("a number", lambda group, number: [dist.all_reduce(number, group=group), number][1:], [torch.tensor(1.5)])
    exact = size == 2
    case.compare("coalesced all_reduce", coalesced_reduce, [one, two], exact)
    case.compare("coalesced all_gather", coalesced_gather, [one, two])
    case.compare("coalesced reduce_scatter", coalesced_scatter, [case.tensor([2 * size], torch.float32)], exact)
    case.compare("all_gather_coalesced", gather_coalesced, [one, case.tensor([2, 2], torch.float32)])
    case.compare("functional collectives", in_functions, [one], exact)
    case.compare("objects", objects, [])
    assert case.compared >= 11, "gloo refused"
    _end(case)


def _end(case):
    dist.barrier(group=case.strata)
    print(f"compared {case.compared}, gloo lacks {case.alone}, both lack {case.refused}")
    dist.destroy_process_group()
