"""What each rank of the tests of mcr_dl does: beside torch.distributed, and as DeepSpeed's communication."""

import mcr_dl
import torch
import torch.distributed as dist
from mcr_bad_input import raises


def beside_torch(backend):
    """Two libraries' calls in one program, in another order on each rank."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        mcr_dl.init(["nccl", "gloo"], timeout=60)
        assert (mcr_dl.get_rank(), mcr_dl.get_size()) == (rank, size)
        for _ in range(10):
            tensors = [torch.full((1000,), float(rank)) for _ in range(2)]
            calls = [lambda: mcr_dl.all_reduce("nccl", tensors[0], async_op=True), lambda: dist.all_reduce(tensors[1], async_op=True)]
            works = [call() for call in (calls if rank % 2 else calls[::-1])]
            for work in reversed(works):
                work.wait()
            assert tensors[0].tolist() == tensors[1].tolist() == [size * (size - 1) / 2] * 1000
        mcr_dl.finalize()
    dist.destroy_process_group()


def deepspeed_collectives():
    import deepspeed.comm as comm

    from strata.mcr_dl.deepspeed import OPERATIONS, init_distributed

    cdb = init_distributed(["nccl", "gloo"], {"all_to_all_single": "gloo", "broadcast": "nccl"}, timeout=60)
    rank, size = comm.get_rank(), comm.get_world_size()
    parts = [comm.new_group(list(range(part, size, 2))) for part in range(2)]
    for group, ranks in ((None, list(range(size))), (parts[rank % 2], list(range(rank % 2, size, 2)))):
        for later in (False, True):
            for strided in (False, True):
                _each(comm, group, ranks, ranks.index(rank), later, strided)
    assert {operation for operation, _ in cdb.calls} == set(OPERATIONS), cdb.calls
    assert not any(operation == "all_to_all_single" and backend != "gloo" for operation, backend in cdb.calls)
    # What is no collective goes by torch.distributed.
    whole = [None] * size
    comm.all_gather_object(whole, rank)
    assert whole == list(range(size))
    tensor = torch.full((3,), float(rank))
    if rank < 2:
        (comm.send if rank else comm.recv)(tensor, 1 - rank)
        assert tensor.tolist() == [1.0] * 3
    comm.barrier()
    comm.destroy_process_group()


def _each(comm, group, ranks, me, later, strided):
    """Each collective, with expected values by the definition."""
    size = len(ranks)

    def made(values, rows=None):
        tensor = torch.tensor(values, dtype=torch.float32).view(rows or -1, 2)
        return tensor.repeat_interleave(2, 1)[:, ::2] if strided else tensor

    def numbers(r, count, first=0):
        return [float(3 * r + first + at) for at in range(count)]

    def end(work, what, tensor, expected):
        assert (work is not None) == later, f"{what}: {work}"
        if later:
            work.wait()
        found = tensor.reshape(-1).tolist()
        assert found == expected, f"{what}, later={later}, strided={strided}: {found} and not {expected}"

    sums = [sum(numbers(r, 6)[at] for r in range(size)) for at in range(6)]
    options, root = {"group": group, "async_op": later}, size - 1
    everyone = [v for r in range(size) for v in numbers(r, 4)]
    tensor = made(numbers(me, 6))
    end(comm.all_reduce(tensor, **options), "all_reduce", tensor, sums)
    tensor = made(numbers(me, 6))
    end(comm.reduce(tensor, ranks[root], **options), "reduce", tensor, sums if me == root else numbers(me, 6))
    tensor = made(numbers(me, 6))
    end(comm.broadcast(tensor, ranks[root], **options), "broadcast", tensor, numbers(root, 6))
    tensor = made([0.0] * (4 * size))
    end(comm.all_gather_into_tensor(tensor, made(numbers(me, 4)), **options), "all_gather_into_tensor", tensor, everyone)
    tensors = [made([0.0] * (2 * r + 2)) for r in range(size)]
    work = comm.all_gather(tensors, made(numbers(me, 2 * me + 2)), **options)
    for r in (*range(size), size - 1):
        end(work, "all_gather", tensors[r], numbers(r, 2 * r + 2))
    whole = [[sum(numbers(r, 4, 10 * block)[at] for r in range(size)) for at in range(4)] for block in range(size)]
    given = [v for block in range(size) for v in numbers(me, 4, 10 * block)]
    tensor = made([0.0] * 4)
    end(comm.reduce_scatter_tensor(tensor, made(given), **options), "reduce_scatter_tensor", tensor, whole[me])
    tensor, blocks = made([0.0] * 4), [made(numbers(me, 4, 10 * block)) for block in range(size)]
    end(comm.reduce_scatter(tensor, blocks, **options), "reduce_scatter", tensor, whole[me])
    tensor = made([0.0] * (4 * size))
    expected = [v for r in range(size) for v in numbers(r, 4, 10 * me)]
    end(comm.all_to_all_single(tensor, made(given), **options), "all_to_all_single", tensor, expected)
    # Rows for rank r of rank s: (r + s) % 3.
    splits = [[(r + s) % 3 for r in range(size)] for s in range(size)]
    mine, theirs = splits[me], [splits[s][me] for s in range(size)]
    given = [v for r in range(size) for v in numbers(me, 2 * mine[r], 10 * r)]
    tensor = made([0.0] * (2 * sum(theirs)), rows=sum(theirs))
    work = comm.all_to_all_single(tensor, made(given, sum(mine)), theirs, mine, **options)
    end(work, "all_to_all_single, uneven", tensor, [v for s in range(size) for v in numbers(s, 2 * splits[s][me], 10 * me)])
    tensors = [made([0.0] * (2 * rows), rows=rows) for rows in theirs]
    sources = [made(numbers(me, 2 * rows, 10 * r), rows) for r, rows in enumerate(mine)]
    work = comm.all_to_all(tensors, sources, **options)
    for s in range(size):
        end(work, "all_to_all", tensors[s], numbers(s, 2 * splits[s][me], 10 * me))
    tensors = [made([0.0] * 4) for _ in range(size)] if me == root else None
    work = comm.gather(made(numbers(me, 4)), tensors, ranks[root], **options)
    for r in range(size):
        end(work, "gather", tensors[r] if me == root else made(numbers(r, 4)), numbers(r, 4))
    tensor, blocks = made([0.0] * 4), [made(numbers(me, 4, 10 * block)) for block in range(size)] if me == root else None
    end(comm.scatter(tensor, blocks, ranks[root], **options), "scatter", tensor, numbers(root, 4, 10 * me))


def deepspeed_bad_routes():
    from strata.mcr_dl.deepspeed import init_distributed

    raises(ValueError, ["'all_redcue'", "did you mean 'all_reduce'?"], lambda: init_distributed("nccl", {"all_redcue": "nccl"}))
    raises(ValueError, ["'mpi'", "not among"], lambda: init_distributed("nccl", {"all_reduce": "mpi"}))
    raises(ValueError, ["'ncll'", "did you mean 'nccl'?"], lambda: init_distributed("nccl", {"all_reduce": "ncll"}))
    raises(TypeError, ["list of names"], lambda: init_distributed(7))
    assert not dist.is_initialized()
