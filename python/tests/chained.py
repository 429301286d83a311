"""Programs that go on with what is final of a call under way: waits for ranges, how they end, and the chain of examples/ccube.py.

Every function runs on each rank of a test.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import strata.torch
import torch
import torch.distributed as dist
from strata.torch import final_count, serves, wait_range
from torch.nn.parallel import DistributedDataParallel

from bad_input import _backend
from beyond_gloo import _begin, _raises

sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

# In a test of how a wait ends, for whoever would wait for ever.
LONG = timedelta(minutes=5)


def ranges(kind):
    """What a wait returns for has its value, and may be overwritten while the call goes on."""
    if kind == "older":
        strata.torch.OLD = True
    if kind == "nodes":
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    rank, size = _begin()
    assert serves() and serves(dist.group.WORLD)
    early = torch.zeros(1)
    for round_ in range(20):
        whole = torch.full((1 << 20,), float(rank + round_))
        expected, end = float(sum(range(size)) + size * round_), 0
        work = dist.all_reduce(whole, async_op=True)
        for part in whole.split(100000):
            end += part.numel()
            wait_range(part)
            known = final_count(whole)
            assert end <= known <= whole.numel(), (end, known)
            early += known < whole.numel()
            assert part.eq(expected).all(), part
            part.fill_(-1)
        work.wait()
        assert whole.eq(-1).all()
        assert final_count(whole) == whole.numel()
    dist.all_reduce(early)
    print(f"{int(early)} waits ended before their call")
    assert early > 0
    dist.destroy_process_group()


def indirect():
    """The library does not know the tensors that are copied, and not yet those of messages whose peer has not come."""
    rank, size = _begin()
    total = sum(range(size))
    for _ in range(10):
        base = torch.full((300, 200), float(rank))
        work = dist.all_reduce(base.t(), async_op=True)
        wait_range(base[0])
        assert base.eq(total).all()
        work.wait()
        parts = [torch.zeros(50000) for _ in range(size)]
        work = dist.all_gather(parts, torch.full((50000,), float(rank)), async_op=True)
        for other in reversed(range(size)):
            wait_range(parts[other])
            assert parts[other].eq(other).all()
        work.wait()
    store = dist.distributed_c10d._get_default_store()
    data = torch.full((1000,), float(rank))
    if rank == 0:
        work = dist.irecv(data[500:], 1)
        assert final_count(data) == 500
        wait_range(data[:500])
        store.set("go", "")
        wait_range(data)
        assert data[:500].eq(0).all() and data[500:].eq(1).all()
        work.wait()
    elif rank == 1:
        store.wait(["go"], timedelta(seconds=40))
        dist.send(data[:500], 0)
    dist.destroy_process_group()


def failed_message():
    """A message that has failed is told of until another call has its tensor."""
    rank, size = _begin(timeout=timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    data = torch.ones(4)
    if rank == 0:
        work = dist.irecv(data, 1)
        words = [f"rank 0 of {size}", "rank 1 has not come to its send within 2 s"]
        _raises(RuntimeError, ["recv", *words], lambda: wait_range(data))
        _raises(RuntimeError, ["wait_range", *words], lambda: wait_range(data))
        _raises(RuntimeError, ["final_count", *words], lambda: final_count(data))
        _raises(RuntimeError, words, work.wait)
        wait_range(torch.ones(4))
        store.set("over", "")
    else:
        store.wait(["over"], timedelta(seconds=40))
    dist.all_reduce(data, async_op=True)
    wait_range(data)
    assert data.eq(size).all()
    dist.destroy_process_group()


def refused():
    """Tensors and groups that nobody can be asked about."""
    rank, size = _begin()
    where = f"rank {rank} of {size}"
    for call in (wait_range, final_count):
        name = call.__name__
        _raises(TypeError, [name, where, "meta"], lambda: call(torch.empty(4, device="meta")))
        _raises(TypeError, [name, where, "to_dense"], lambda: call(torch.eye(3).to_sparse()))
    _raises(ValueError, ["final_count", where, "contiguous"], lambda: final_count(torch.ones(3, 4).t()))
    # In no call, and of nothing.
    wait_range(torch.ones(3, 4).t())
    wait_range(torch.ones(0))
    assert final_count(torch.ones(5)) == 5 and final_count(torch.ones(0)) == 0

    gloo = dist.new_group(backend="gloo")
    assert not serves(gloo)
    _raises(TypeError, ["wait_range", "not Strata's"], lambda: wait_range(torch.ones(3), gloo))
    _raises(TypeError, ["final_count", "not Strata's"], lambda: final_count(torch.ones(3), gloo))

    def in_a_batch():
        with dist._coalescing_manager(device=torch.device("cpu")):
            wait_range(torch.ones(3))

    _raises(RuntimeError, ["wait_range", where, "batch"], in_a_batch)
    group, backend = dist.group.WORLD, _backend()
    dist.destroy_process_group()
    _raises(RuntimeError, ["wait_range", where, "destroyed"], lambda: backend.wait_range(torch.ones(3)))
    _raises(RuntimeError, ["final_count", where, "destroyed"], lambda: backend.final_count(torch.ones(3)))
    _raises((RuntimeError, TypeError), ["wait_range"], lambda: wait_range(torch.ones(3), group))
    _raises(ValueError, [], lambda: wait_range(torch.ones(3)))


def ends(what):
    """A wait for a call that does not come to its end."""
    rank, size = _begin(timeout=timedelta(seconds=2) if what == "limit" else LONG)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank:
        if what == "death":
            os._exit(7)
        store.wait(["over"], timedelta(seconds=40))
        return
    backend, where = _backend(), f"rank 0 of {size}"
    data = torch.ones(1000)
    dist.all_reduce(data, async_op=True)
    assert final_count(data) == 0
    begin, threads = time.monotonic(), []
    if what == "before":
        backend.abort()
    if what == "shutdown":
        threads.append(threading.Timer(0.3, backend.shutdown))
    if what in ("abort", "shutdown"):
        threads.append(threading.Timer(0.6, backend.abort))
    for thread in threads:
        thread.start()
    word = "rank 1" if what in ("limit", "death") else "aborted"
    _raises(RuntimeError, [where, word], lambda: wait_range(data[:10]))
    assert time.monotonic() - begin < 6, time.monotonic() - begin
    # And so it stays.
    _raises(RuntimeError, [where], lambda: wait_range(data[:10]))
    _raises(RuntimeError, [where], lambda: final_count(data))
    for thread in threads:
        thread.join()
    store.set("over", "")


def _model(kind):
    import model

    made = model.make()
    if kind == "shared":
        made.head.weight = made.embedding.weight
    return made


def _trained(way, kind):
    """Losses and parameters of one of the ways of examples/ccube.py."""
    import ccube
    import model

    made, chain, losses = _model(kind), None, []
    if way == "ddp":
        optimizer = model.optimizer_of(made.parameters())
    else:
        chain = ccube.Chain(made, model.optimizer_of)
    parallel = DistributedDataParallel(made, bucket_cap_mb=0.02, gradient_as_bucket_view=kind == "views")
    if chain is not None:
        parallel.register_comm_hook(chain, ccube.Chain.hook)
    for step in range(model.STEPS):
        sequences = model.words(dist.get_rank(), step)
        if kind == "accumulated":
            with parallel.no_sync():
                model.loss_of(parallel, model.words(dist.get_rank(), 100 + step)).backward()
        loss = model.loss_of(parallel, sequences)
        loss.backward()
        if way == "whole":
            chain.finish()
        elif way == "ddp":
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if chain is not None:
        chain.finish()
    return losses, model.parameters_of(made)


def alike(backend, kind):
    """A chain learns bit by bit what the same call learns without, and nearly what DDP's own calls do."""
    if kind == "nodes":
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    dist.init_process_group(backend)
    assert serves() == (backend == "strata")
    chain, whole, ddp = (_trained(way, kind) for way in ("chain", "whole", "ddp"))
    assert len(set(chain[0])) == len(chain[0]), "nothing was learnt"
    assert chain[0] == whole[0], f"{chain[0]} is not {whole[0]}"
    for name, parameter in chain[1].items():
        assert torch.equal(parameter, whole[1][name]), name
        assert torch.allclose(parameter, ddp[1][name], rtol=0, atol=1e-6 * parameter.abs().max().item()), name
    dist.destroy_process_group()


def chain_of_a_dead_group():
    """The forward pass after the call has failed raises, and does not wait for ever."""
    import ccube
    import model

    rank, size = _begin(timeout=LONG)
    made = model.make()
    chain = ccube.Chain(made, model.optimizer_of)
    parallel = DistributedDataParallel(made)
    parallel.register_comm_hook(chain, ccube.Chain.hook)
    for step in range(2):
        model.loss_of(parallel, model.words(rank, step)).backward()
    loss = model.loss_of(parallel, model.words(rank, 2))
    dist.barrier()
    if rank == 1:
        os._exit(7)
    loss.backward()
    begin = time.monotonic()
    _raises(RuntimeError, [f"rank {rank} of {size}", "rank 1"], lambda: made(model.words(rank, 3)[:, :-1]))
    _raises(RuntimeError, [f"rank {rank} of {size}"], chain.finish)
    assert time.monotonic() - begin < 6, time.monotonic() - begin


def unused_layer():
    """A layer whose forward pass was not run has computed with old parameters, or not at all."""
    import ccube

    _begin()
    torch.manual_seed(1)

    class Hidden(torch.nn.Module):
        """Uses a layer's parameters without the layer."""

        def __init__(self):
            super().__init__()
            self.first, self.inner = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.nn.functional.linear(self.first(x), self.inner.weight, self.inner.bias)

    made = Hidden()
    chain = ccube.Chain(made, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    parallel = DistributedDataParallel(made)
    parallel.register_comm_hook(chain, ccube.Chain.hook)
    parallel(torch.ones(2, 4)).sum().backward()
    loss = parallel(torch.ones(2, 4)).sum()
    _raises(RuntimeError, ["'inner'", "old parameters"], loss.backward)
    dist.destroy_process_group()
