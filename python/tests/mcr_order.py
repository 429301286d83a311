"""What each rank of the tests of mcr_dl does: orders, handles, backends, and tensors that change between equal calls."""

import gc
import os
import random
import time

import mcr_dl
import numpy as np
import torch
from mcr_calls import begin
from mcr_tensors import Plain

from strata.mcr_dl import World


def opposite_orders():
    """Backends called in another order on each rank, and waited for in the reverse: no hang, and every result right."""
    names = ["nccl", "gloo", "auto"]
    rank, size = begin(names)
    if os.environ.get("MCR_MPI"):
        names.append("mpi")
        mcr_dl.init("mpi", timeout=60)
    for seed in range(int(os.environ.get("MCR_SEEDS", "40"))):
        shared = random.Random(seed)
        lengths = {name: [shared.choice([1, 3, 1000, 40000]) for _ in range(3)] for name in names}
        own = random.Random(1000 * seed + rank)
        # Even ranks begin with one backend, odd ranks with another; then each as it likes, every backend in its order.
        calls = [(name, at) for name in names for at in range(3)]
        left = {name: iter(range(3)) for name in names}
        order = [name for name, _ in calls]
        own.shuffle(order)
        order.insert(0, order.pop(order.index(names[rank % 2])))
        works, made = [], {}
        for name in order:
            at = next(left[name])
            tensor = np.arange(lengths[name][at], dtype=np.int32) + rank + seed
            made[name, at] = tensor
            works.append(mcr_dl.all_reduce(name, tensor, async_op=True))
        for work in reversed(works):
            work.wait()
        for (name, at), tensor in made.items():
            expected = size * (np.arange(lengths[name][at], dtype=np.int32) + seed) + size * (size - 1) // 2
            assert np.array_equal(tensor, expected), f"seed {seed}: {name} {at}"
    mcr_dl.finalize()


def carriers():
    """Backends by two carriers, with messages, and algorithms of both by name."""
    mcr_dl.init(["mv2-gdr", "nccl"], timeout=60)
    rank, size = mcr_dl.get_rank(), mcr_dl.get_size()
    for name in ("mv2-gdr", "nccl", "auto", "@mpi", "ring@tcp"):
        tensor, blocks = np.full(3000, rank), np.arange(size)
        mcr_dl.all_reduce(name, tensor)
        assert tensor.tolist() == [size * (size - 1) // 2] * 3000, name
        exchange = "pairwise@tcp" if name == "ring@tcp" else name
        mcr_dl.all_to_allv(exchange, blocks, np.full(size, rank), [1] * size, [1] * size)
        assert blocks.tolist() == list(range(size)), name
    for name in ("mv2-gdr", "nccl"):
        taken = np.zeros(5, np.int64)
        works = [mcr_dl.send(name, np.full(5, rank), (rank + 1) % size, True), mcr_dl.recv(name, taken, (rank - 1) % size, True)]
        for work in works:
            work.wait()
        assert taken.tolist() == [(rank - 1) % size] * 5, name
    mcr_dl.finalize()
    print("mv2-gdr, tcp and auto are right", flush=True)


def opposite_orders_that_wait():
    """Rank 0 waits for its calls on one backend before it calls on the other, and the other ranks do the reverse: calls are queued."""
    rank, size = begin()
    for _ in range(30):
        tensors = {name: torch.full((500,), float(rank)) for name in ("nccl", "gloo")}
        first, second = ("nccl", "gloo") if rank % 2 else ("gloo", "nccl")
        works = {name: mcr_dl.all_reduce(name, tensors[name], async_op=True) for name in (first, second)}
        for name in (second, first):
            works[name].wait()
            assert tensors[name].tolist() == [size * (size - 1) / 2] * 500
    mcr_dl.finalize()


def one_backend_beside_another():
    """A call that waits for a late rank holds up none by another backend."""
    rank, size = begin()
    slow, fast = np.full(4, rank), np.full(4, rank)
    if rank == size - 1:
        # It comes to the slow call only when the others have got through the fast one.
        mcr_dl.all_reduce("gloo", fast)
        mcr_dl.recv("auto", np.zeros(1), 0)
        mcr_dl.all_reduce("nccl", slow)
    else:
        work = mcr_dl.all_reduce("nccl", slow, async_op=True)
        mcr_dl.all_reduce("gloo", fast)
        assert not work.is_completed() and not work.is_success()
        try:
            work.wait(timeout=0.05)
        except mcr_dl.McrTimeout as error:
            assert isinstance(error, mcr_dl.McrError) and isinstance(error, TimeoutError)
            assert "all_reduce" in str(error), error
        else:
            raise AssertionError("a limit has passed, and nothing said so")
        # Rank 0 lets the late one go on when no other has anything to look at any more.
        if rank:
            mcr_dl.send("auto", np.zeros(1), 0)
        else:
            for other in range(1, size - 1):
                mcr_dl.recv("auto", np.zeros(1), other)
            mcr_dl.send("auto", np.zeros(1), size - 1)
        work.wait("nccl")
    assert slow.tolist() == fast.tolist() == [size * (size - 1) // 2] * 4
    mcr_dl.finalize()


def order_of_one_backend():
    """Calls of one backend, queued or not, come one after another: each uses the result of the one before."""
    rank, size = begin()
    for later in ([True, True, True], [True, False, True], [True, True, False]):
        if rank == size - 1:
            time.sleep(0.01)
        tensor, works = torch.ones(3000, dtype=torch.int64), []
        for is_queued in later:
            works.append(mcr_dl.all_reduce("nccl", tensor, async_op=is_queued))
        mcr_dl.synchronize("nccl")
        assert tensor.tolist() == [size**3] * 3000
        assert all(work is None or work.is_completed() for work in works)
    mcr_dl.finalize()


def dropped_handles():
    """Handles and tensors that the program drops while calls are queued: the calls still are right, and memory comes back."""
    rank, size = begin()
    results = [np.zeros(size, dtype=np.int64) for _ in range(300)]
    for at, result in enumerate(results):
        mcr_dl.all_gather("nccl", result, np.full(1, 1000 * at + rank), async_op=True)
        if at % 50 == 0:
            gc.collect()
    mcr_dl.synchronize()
    for at, result in enumerate(results):
        assert result.tolist() == [1000 * at + r for r in range(size)]
    works = [mcr_dl.all_reduce("gloo", np.ones(10), async_op=True) for _ in range(100)]
    mcr_dl.finalize()
    assert all(work.is_completed() for work in works)


def backends():
    """Backends are made by name, added, ended one by one and made again."""
    for again in range(2):
        assert mcr_dl.get_backends() == []
        mcr_dl.init("nccl")
        rank, size = mcr_dl.get_rank("nccl"), mcr_dl.get_size("nccl")
        assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        assert mcr_dl.get_backends() == ["nccl"] and mcr_dl.get_rank("auto") == rank
        mcr_dl.init(["nccl", "sccl", "mv2-gdr"] if again else ["nccl", "sccl"])
        named = mcr_dl.get_backends()
        assert named[:2] == ["nccl", "sccl"]
        for name in [*named, "auto", "ring@tcp", "@tcp"]:
            tensor = torch.ones(10)
            mcr_dl.all_reduce(name, tensor)
            assert tensor.tolist() == [size] * 10, name
        mcr_dl.finalize("nccl")
        assert mcr_dl.get_backends() == named[1:]
        for name in ("sccl", "auto"):
            tensor = torch.ones(10)
            mcr_dl.all_reduce(name, tensor)
            assert tensor.tolist() == [size] * 10, name
        for name in ("nccl", "sccl" if again else "mpi"):
            if name not in mcr_dl.get_backends():
                try:
                    mcr_dl.all_reduce(name, torch.ones(10))
                except ValueError as error:
                    assert name in str(error) and "init" in str(error), error
                else:
                    raise AssertionError(f"{name} is not there, and was taken")
        mcr_dl.finalize(named[1:])
    mcr_dl.init()
    tensor = torch.ones(1)
    mcr_dl.all_reduce("auto", tensor)
    assert tensor.item() == size and mcr_dl.get_backends() == ["auto"]
    mcr_dl.finalize()


def parts_of_the_ranks():
    """A group of some ranks, which meet by a store of PyTorch's."""
    import torch.distributed as dist

    from strata.mcr_dl import meet_by_store

    rank, size = begin()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MCR_PORT"]), size, rank == 0)
    part = rank % 2
    ranks = list(range(part, size, 2))
    world = World(lambda: meet_by_store(store, f"part{part}", ranks.index(rank), len(ranks)))
    world.init(["nccl", "gloo"], timeout=60)
    assert (world.get_rank(), world.get_size()) == (ranks.index(rank), len(ranks))
    tensor, whole = torch.ones(100), torch.ones(100)
    work = world.all_reduce("gloo", tensor, async_op=True)
    mcr_dl.all_reduce("gloo", whole)
    work.wait()
    assert tensor.tolist() == [len(ranks)] * 100 and whole.tolist() == [size] * 100
    world.finalize()
    mcr_dl.all_reduce("nccl", whole)
    mcr_dl.finalize()


def changed_tensors():
    """Between equal calls, tensors get other memory, sizes and types, and their ids go to others: no call goes by what was."""
    rank, size = begin()
    wanted = size * (size - 1) // 2

    def reduce(tensor):
        mcr_dl.all_reduce("nccl", tensor)

    array = np.full(8, rank, np.float32)
    reduce(array)
    array[:] = rank
    array.resize(4096, refcheck=False)
    array[:] = rank
    reduce(array)
    assert array.tolist() == [wanted] * 4096
    array = np.full(16, rank, np.int32)
    for dtype in (np.int32, np.int16, np.uint8, np.int64):
        array.fill(0)
        array.dtype = dtype
        array.fill(rank)
        reduce(array)
        assert array.tolist() == [wanted] * len(array), dtype
    tensor = torch.full((6, 4), float(rank))
    reduce(tensor)
    tensor.data = torch.full((9, 2), rank, dtype=torch.int32)
    reduce(tensor)
    assert tensor.tolist() == [[wanted] * 2] * 9
    tensor.data = torch.full((3,), rank, dtype=torch.float64)
    reduce(tensor)
    tensor.fill_(rank).resize_(5000).fill_(rank)
    reduce(tensor)
    assert tensor.tolist() == [wanted] * 5000
    tensor = torch.full((6, 4), float(rank))
    reduce(tensor)
    tensor.t_()
    for kind, call in ((ValueError, lambda: reduce(tensor)),):
        try:
            call()
        except kind as error:
            assert "contiguous" in str(error), error
        else:
            raise AssertionError("a tensor that is not contiguous any more was taken")
    array = np.full(8, rank, np.float32)
    reduce(array)
    array.flags.writeable = False
    try:
        reduce(array)
    except ValueError as error:
        assert "written" in str(error), error
    else:
        raise AssertionError("an array that may not be written to was")
    # Ids that come again.
    own = random.Random(5)
    for step in range(2000):
        length, kind = own.choice([1, 2, 30]), own.randrange(5)
        if kind == 0:
            tensor = torch.full((length,), rank, dtype=own.choice([torch.int32, torch.float32, torch.int16]))
        elif kind == 1:
            tensor = torch.full((2 * length,), float(rank))[:length]
        elif kind == 2:
            tensor = np.full(length, rank, own.choice([np.int32, np.float32, np.int16]))
        elif kind == 3:
            tensor = np.full(2 * length, rank, np.float32)[length:]
        else:
            inside = np.full(length, rank, np.float32)
            tensor = Plain(inside)
        for _ in range(2):
            reduce(tensor)
        result = inside if kind == 4 else tensor
        assert result.tolist() == [wanted * size] * length, (step, result)
        del tensor, result
    mcr_dl.finalize()


def what_fits():
    """What was prepared for one tensor fits that one alone, whatever has its id."""
    from strata.mcr_dl._memory import memory_of

    tensor, array = torch.ones(3), np.ones(3, np.float32)
    others = [torch.ones(3), np.ones(3, np.float32), Plain(array), None, tensor.view(3), torch._neg_view(tensor)]
    for mine in (tensor, array):
        memory = memory_of(mine, "output", True)
        assert memory.fits(mine)
        # An array is known by its place: another one has another id.
        apart = [other for other in others if mine is tensor or not isinstance(other, np.ndarray)]
        assert not any(memory.fits(other) for other in (*apart, tensor if mine is array else array))
    assert memory_of(Plain(array), "output", True).fits is None
    flags = memory_of(array, "input", False)
    array.flags.writeable = False
    assert flags.fits(array) and not memory.fits(array)


def many_kept_calls():
    """More tensors than calls are kept for, each called with twice."""
    rank, size = begin()
    tensors = [np.full(3, rank, np.int64) for _ in range(1500)]
    for _ in range(2):
        for tensor in tensors:
            mcr_dl.all_reduce("nccl", tensor)
    assert all(tensor.tolist() == [size * (size * (size - 1) // 2)] * 3 for tensor in tensors)
    # Each backend's calls are kept for that one, whatever the tensors.
    output, source = np.zeros(2 * size), np.zeros(2)
    for name in ("nccl", "gloo", "nccl"):
        for call in (mcr_dl.bcast, mcr_dl.all_reduce, mcr_dl.reduce, mcr_dl.reduce_scatter):
            call(name, output)
        mcr_dl.all_gather(name, output, source)
        mcr_dl.reduce_scatter(name, source, input=output)
        mcr_dl.all_to_all_single(name, output, output.copy())
    kept = {**mcr_dl._world._kept, **mcr_dl._world._kept_pairs}
    of_gloo = [key for key in kept if "gloo" in key]
    assert len(of_gloo) == 7, of_gloo
    assert all(entry[-2].name in key for key, entry in kept.items())
    pairs = [(np.zeros(size, np.int64), np.full(size, rank)) for _ in range(700)]
    for _ in range(2):
        for output, source in pairs:
            output.fill(-1)
            mcr_dl.all_to_all_single("gloo", output, source)
            assert output.tolist() == list(range(size))
    mcr_dl.finalize()


def far_tensors():
    """Lists whose tensors lie in several mappings of memory, and inputs among outputs."""
    import mmap

    rank, size = begin()
    maps = [mmap.mmap(-1, 1 << 20) for _ in range(2 * size)]
    arrays = [np.frombuffer(memory, np.uint8)[1 + at :][:1000] for at, memory in enumerate(maps)]
    outputs, inputs = [], []
    for r in range(size):
        heap = np.zeros(1000, np.uint8)
        outputs.append(arrays[2 * r] if r % 2 else heap)
        inputs.append(arrays[2 * r + 1])
        inputs[-1][:] = 10 * rank + r
    mcr_dl.all_to_all("nccl", outputs, inputs)
    for r, output in enumerate(outputs):
        assert output.tolist() == [10 * r + rank] * 1000
    block = torch.arange(float(2 * size * 5)).view(2 * size, 5) + 100 * rank
    mcr_dl.all_to_all("gloo", [block[2 * r] for r in range(size)], [block[2 * r + 1] for r in range(size)])
    for r in range(size):
        assert block[2 * r].tolist() == [100 * r + 5 * (2 * rank + 1) + at for at in range(5)]
    mcr_dl.finalize()


def left_behind():
    """A program that ends without finalize, with a call of its own under way that has ended everywhere."""
    rank, size = begin()
    work = mcr_dl.all_reduce("nccl", torch.ones(100000), async_op=True)
    del work


def left_waiting():
    """A program that ends with a call under way that the other rank never makes: it ends all the same, and the other is told."""
    rank, size = begin()
    if rank == 0:
        mcr_dl.all_reduce("nccl", torch.ones(100000), async_op=True)
    else:
        try:
            mcr_dl.recv("gloo", np.ones(1), 0)
        except mcr_dl.McrError as error:
            assert "rank 0" in str(error), error
        else:
            raise AssertionError("nothing was sent, and it was received")


def threads():
    """Each backend has a thread of its own, whose calls wait for no other's."""
    import threading

    rank, size = begin()
    wrong = []

    def calls(name):
        for at in range(300):
            tensor = np.full(7, rank + at)
            mcr_dl.all_reduce(name, tensor, async_op=True).wait()
            wrong.extend([name] if tensor[0] != size * (size - 1) // 2 + size * at else [])
            mcr_dl.all_reduce(name, tensor, mcr_dl.ReduceOp.MAX)

    threads = [threading.Thread(target=calls, args=(name,)) for name in ("nccl", "gloo", "auto")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    mcr_dl.finalize()


def forked_child():
    """A fork has none of its parent's backends, and makes its own."""
    rank, size = begin()
    mcr_dl.all_reduce("nccl", np.ones(3))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert mcr_dl.get_backends() == []
            try:
                mcr_dl.all_reduce("nccl", np.ones(3))
            except mcr_dl.McrError as error:
                code = 0 if "init" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    mcr_dl.all_reduce("nccl", np.ones(3))
    mcr_dl.finalize()
