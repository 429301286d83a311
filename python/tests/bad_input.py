"""Wrong calls: each raises an exception that names rank and call, in time, and ends no process.

Every function runs on each rank of a test.
"""

import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from beyond_gloo import _begin, _raises

# Whoever waits for what never comes gets an error after this, and the test fails.
LIMIT = timedelta(seconds=20)


def _backend():
    """What makes the calls: in PyTorch 2.13 the group itself."""
    group = dist.group.WORLD
    return group._get_backend(torch.device("cpu")) if type(group) is dist.ProcessGroup else group


def tensors_elsewhere():
    rank, size = _begin()
    where = f"rank {rank} of {size}"
    away = torch.empty(4, device="meta")
    _raises(TypeError, ["all_reduce", where, "meta", "CPU tensors"], lambda: _backend().allreduce([away]))
    _raises(TypeError, ["send", where], lambda: _backend().send([away], 0, 0))
    sparse = torch.eye(3).to_sparse()
    _raises(TypeError, ["all_reduce", where, "to_dense"], lambda: _backend().allreduce([sparse]))
    _raises(Exception, ["all_reduce"], lambda: dist.all_reduce(sparse))
    dist.barrier()
    dist.destroy_process_group()


def cuda_hint():
    rank, size = _begin()

    class OnGpu:
        """What the checks read of a tensor on a GPU, which the machine of a test lacks."""

        is_cpu, layout, device = False, torch.strided, torch.device("cuda:0")

    words = ["all_reduce", f"rank {rank} of {size}", "cuda:0", "LD_PRELOAD", "cpu:strata,cuda:nccl"]
    _raises(TypeError, words, lambda: _backend()._check("all_reduce", OnGpu()))
    dist.destroy_process_group()


def types_and_operations():
    rank, size = _begin()
    where = f"rank {rank} of {size}"
    for data, op in (
        (torch.ones(3), ReduceOp.BAND),
        (torch.ones(3).bool(), ReduceOp.AVG),
        (torch.ones(3, dtype=torch.complex64), ReduceOp.MAX),
        (torch.ones(3, dtype=torch.complex64), ReduceOp.PRODUCT),
        (torch.ones(3, dtype=torch.float16), ReduceOp.BXOR),
    ):
        backend, options = _backend(), dist.AllreduceOptions()
        options.reduceOp = op
        _raises(TypeError, ["all_reduce", where, str(data.dtype)], lambda: backend.allreduce([data], options))
    _raises(NotImplementedError, ["recv", where, "any rank"], lambda: dist.recv(torch.ones(3)))
    dist.barrier()
    dist.destroy_process_group()


def sizes_and_counts():
    rank, size = _begin()
    where, other = f"rank {rank} of {size}", (rank + 1) % size
    backend = _backend()

    def refused(call, *words):
        _raises((ValueError, RuntimeError), [where, *words], call)

    ones = torch.ones
    refused(lambda: dist.all_gather_into_tensor(ones(3), ones(2)), "all_gather_single", f"{2 * size} elements")
    refused(lambda: dist.reduce_scatter_tensor(ones(2), ones(3)), "reduce_scatter_single", f"{2 * size} elements")
    refused(lambda: dist.all_gather([ones(2)] * (size + 1), ones(2)), "all_gather", f"{size} outputs")
    refused(lambda: dist.reduce_scatter(ones(2), [ones(2)]), "reduce_scatter", f"{size} inputs")
    refused(lambda: dist.all_to_all_single(ones(size + 1), ones(size + 1)), "all_to_all_single", "cannot be split")
    refused(lambda: dist.all_to_all_single(ones(4), ones(4), [9] * size, [2] * size), "all_to_all_single", "split sizes")
    refused(lambda: dist.all_to_all([ones(1)], [ones(1)]), "all_to_all", f"{size} inputs")
    if rank == 0:
        refused(lambda: dist.gather(ones(2), [ones(2)] * (size + 1), 0), "gather", f"{size} outputs")
        refused(lambda: dist.gather(ones(2), [ones(3)] * size, 0), "gather", "2 elements")
        refused(lambda: dist.scatter(ones(2), [ones(3)] * size, 0), "scatter", "2 elements")
    refused(lambda: backend.allreduce([ones(2), ones(2)]), "all_reduce", "one tensor")
    refused(lambda: backend.send([ones(2)], size, 0), "send", "not a rank")
    refused(lambda: backend.send([ones(2)], other, -1), "send", "negative")
    options = dist.BroadcastOptions()
    options.rootRank = size
    refused(lambda: backend.broadcast([ones(2)], options), "broadcast", "not a rank")
    # The group is as good as before.
    data = ones(3)
    dist.all_reduce(data)
    assert data.eq(size).all()
    dist.destroy_process_group()


def different_calls(kind, later):
    """Rank 0 makes another call than the others, or the same of another type, size or operation."""
    later = later == "True"
    rank, size = _begin(timeout=LIMIT)
    dist.barrier()
    begin = time.monotonic()

    def call():
        if rank:
            work = dist.all_reduce(torch.ones(4), async_op=later)
        elif kind == "call":
            work = dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * size), async_op=later)
        elif kind == "type":
            work = dist.all_reduce(torch.ones(4).double(), async_op=later)
        elif kind == "size":
            work = dist.all_reduce(torch.ones(1000), async_op=later)
        else:
            work = dist.all_reduce(torch.ones(4), ReduceOp.MAX, async_op=later)
        if later:
            future = work.get_future()
            try:
                work.wait()
            finally:
                assert future.done()
                _raises(RuntimeError, ["strata: ", f"rank {rank} of {size}"], future.wait)

    both = {
        "call": ["called reduce_scatter of", "called all_reduce of 4 float"],
        "type": ["4 double", "4 float"],
        "size": ["1000 float", "4 float"],
        "operation": ["(max)", "(sum)"],
    }
    _raises(RuntimeError, [f"rank {rank} of {size}", "rank 0 called", "rank 1 called", *both[kind]], call)
    assert time.monotonic() - begin < 5, "the error came late"


def messages_of_different_sizes():
    """A short message has left its sender when the receiver sees its size."""
    rank, size = _begin(timeout=LIMIT)
    if rank == 0:
        dist.send(torch.ones(10), 1)
        dist.barrier()
    else:
        words = ["recv from rank 0", f"rank {rank} of {size}", "40", "4000"]
        _raises(RuntimeError, words, lambda: dist.recv(torch.ones(1000), 0))
        dist.barrier()


def death(what):
    rank, size = _begin(timeout=timedelta(minutes=5))
    dist.barrier()
    if rank == 1:
        os._exit(7)
    begin = time.monotonic()
    if what == "queued":
        call = lambda: dist.all_reduce(torch.ones(4), async_op=True).wait()
    else:
        call = lambda: dist.all_reduce(torch.ones(4))
    error = _raises(RuntimeError, [f"rank {rank} of {size}"], call)
    assert "rank 1" in str(error), error
    seconds = time.monotonic() - begin
    assert seconds < 2, f"{seconds:.1f} s"


def death_on_a_channel():
    """The receiver waits on a channel whose sender dies after a first message."""
    rank, size = _begin(timeout=timedelta(minutes=5))
    if rank == 1:
        dist.send(torch.ones(4), 0)
        dist.barrier()
        os._exit(7)
    if rank == 0:
        dist.recv(torch.ones(4), 1)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        _raises(RuntimeError, ["recv from rank 1", f"rank 0 of {size}"], lambda: dist.recv(torch.ones(4), 1))
        assert time.monotonic() - begin < 2


def death_before_a_message(what):
    """A rank dies, and others wait for its side of a message that is the first of its tag, or for it at a barrier."""
    rank, size = _begin(timeout=timedelta(minutes=5))
    dist.barrier()
    if rank == 1:
        os._exit(7)
    where, begin = f"rank {rank} of {size}", time.monotonic()
    if what == "barrier":
        limit = timedelta(minutes=4)
        _raises(RuntimeError, ["monitored_barrier", where], lambda: dist.monitored_barrier(timeout=limit))
    elif what == "send":
        _raises(RuntimeError, ["send to rank 1", where], lambda: dist.send(torch.ones(4), 1))
    else:
        _raises(RuntimeError, ["recv from rank 1", where], lambda: dist.recv(torch.ones(4), 1))
    assert time.monotonic() - begin < 3, time.monotonic() - begin


def message_to_nobody():
    """A peer that never comes to its side of a message is named, and so is the limit."""
    rank, size = _begin(timeout=timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"], timedelta(seconds=40))
        return
    words = ["recv from rank 1", f"rank {rank} of {size}", "rank 1 has not come to its send within 2 s"]
    _raises(RuntimeError, words, lambda: dist.recv(torch.ones(4), 1))
    words = [f"recv from rank {rank}", "has not come within 2 s"]
    work = _backend().recv([torch.ones(4)], rank, 0)
    _raises(RuntimeError, words, work.wait)
    store.set("over", "yes")


def different_splits(expects):
    """Rank 1 gives rank 0 two rows, which expects none, or the other way round: who expects something else is told."""
    rank, size = _begin(timeout=LIMIT)
    inputs, outputs = ([[0, 0], [2, 0]], [[0, 0], [0, 0]])
    if expects == "more":
        inputs, outputs = ([[0, 0], [0, 0]], [[0, 2], [0, 0]])
    data, output = torch.ones(sum(inputs[rank])), torch.zeros(sum(outputs[rank]))

    def call():
        dist.all_to_all_single(output, data, outputs[rank], inputs[rank])
        # Who has sent may hear of it by the next call.
        dist.barrier()

    _raises(RuntimeError, [f"rank {rank} of {size}"], call)


def factors():
    """What PREMUL_SUM cannot multiply by."""
    rank, size = _begin()
    where = f"rank {rank} of {size}"
    for data, factor in (
        (torch.ones(3, dtype=torch.complex64), torch.tensor(1j)),
        (torch.ones(3, dtype=torch.int32), 0.5),
        (torch.ones(3), torch.empty((), device="meta")),
    ):
        op = dist._make_nccl_premul_sum(factor)
        _raises(TypeError, ["all_reduce", where, "PREMUL_SUM"], lambda: dist.all_reduce(data, op))
    data = torch.ones(3, dtype=torch.int32)
    dist.all_reduce(data, dist._make_nccl_premul_sum(2.0))
    assert data.tolist() == [2 * size] * 3, data
    dist.destroy_process_group()


def refused_in_a_batch():
    """PyTorch itself refuses a message in a batch: later calls are not taken for that batch's."""
    rank, size = _begin()
    peer, sparse = 1 - rank, torch.eye(3).to_sparse()
    ops = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.isend, sparse, peer)]
    _raises(Exception, [], lambda: dist.batch_isend_irecv(ops))
    data = torch.ones(2)
    dist.all_reduce(data)
    assert data.tolist() == [size] * 2, data
    dist.destroy_process_group()


def under_way_at_the_end(what):
    """The program ends while a thread of Strata's is in PyTorch's C++, whence it comes back without the interpreter."""
    from strata.torch import _messages

    rank, _size = _begin()
    store = dist.distributed_c10d._get_default_store()

    def busy(*_arguments):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            store.check(["never"])
        raise RuntimeError("it was only busy")

    if what == "message":
        _messages.Channel._await_peer = busy
        if rank == 0:
            dist.isend(torch.ones(3), 1)
            _backend().abort()
            time.sleep(0.1)
        return
    dist.all_reduce(torch.ones(3), async_op=True).get_future().then(busy)
    time.sleep(0.1)
    dist.destroy_process_group()


def timeouts(what):
    """Rank 0 calls what no other rank does, under a limit."""
    limit = timedelta(seconds=6 if what == "group" else 1)
    rank, size = _begin(timeout=limit if what == "group" else timedelta(minutes=5))
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if what == "another message":
        (dist.send if rank else dist.recv)(torch.ones(4), 1 - rank)
    if what in ("set", "message", "another message"):
        dist.set_timeout(limit)
    if rank:
        store.wait(["over"], timedelta(seconds=40))
        return
    begin = time.monotonic()
    if what == "call":
        call = lambda: dist.barrier(timeout=limit)
    elif what == "queued":
        options = dist.AllreduceOptions()
        options.timeout = limit
        call = lambda: _backend().allreduce([torch.ones(4)], options).wait()
    elif what == "wait":
        call = lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(limit)
    elif "message" in what:
        call = lambda: dist.recv(torch.ones(4), 1)
    else:
        call = lambda: dist.all_reduce(torch.ones(4))
    _raises(RuntimeError, [f"rank 0 of {size}"], call)
    seconds, least = time.monotonic() - begin, limit.total_seconds()
    store.set("over", "")
    assert 0.9 * least < seconds < least + 3, f"{seconds:.1f} s"


def after_destroy():
    rank, size = _begin()
    group, where = dist.group.WORLD, f"rank {rank} of {size}"
    backend = _backend()
    dist.destroy_process_group()
    _raises(RuntimeError, ["all_reduce", where, "destroyed"], lambda: backend.allreduce([torch.ones(3)]))
    _raises(RuntimeError, ["send", where, "destroyed"], lambda: backend.send([torch.ones(3)], 0, 0))
    _raises(RuntimeError, [where, "destroyed"], lambda: group.allreduce([torch.ones(3)]))
    _raises(ValueError, [], lambda: dist.all_reduce(torch.ones(3)))
    backend.shutdown(), backend.abort()


def abort_from_another_thread(what):
    """One thread waits in a call that nobody answers, another one ends the group."""
    rank, size = _begin(timeout=timedelta(minutes=5))
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["over"], timedelta(seconds=40))
        return
    backend = _backend()
    aborter = threading.Timer(0.5, backend.abort)
    aborter.start()
    begin = time.monotonic()
    if what == "shutdown":
        work = dist.all_reduce(torch.ones(3), async_op=True)
        backend.shutdown()
        _raises(RuntimeError, ["all_reduce", f"rank 0 of {size}"], work.wait)
    else:
        _raises(RuntimeError, ["all_reduce", f"rank 0 of {size}"], lambda: dist.all_reduce(torch.ones(3)))
    assert 0.4 < time.monotonic() - begin < 3
    aborter.join()
    store.set("over", "")
    _raises(RuntimeError, ["aborted"], lambda: backend.allreduce([torch.ones(3)]))


def after_abort():
    rank, size = _begin(timeout=timedelta(minutes=5))
    backend = _backend()
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        message = dist.irecv(torch.ones(3), 1)
        backend.abort()
        begin = time.monotonic()
        _raises(RuntimeError, ["all_reduce", f"rank 0 of {size}"], work.wait)
        _raises(RuntimeError, ["recv", f"rank 0 of {size}"], message.wait)
        assert time.monotonic() - begin < 2
        _raises(RuntimeError, ["aborted"], lambda: backend.allreduce([torch.ones(3)]))
