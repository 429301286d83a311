"""Trains a small transformer in the ways of PyTorch itself, and saves losses and parameters.

usage: torchrun --nproc-per-node N train.py BACKEND FOLDER WAY...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model import BATCH, STEPS, WIDTH, WORDS, loss_of, make, optimizer_of, parameters_of, train, whole, words
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def ddp(rank, _size):
    model = DistributedDataParallel(make())
    return train(model, optimizer_of(model.parameters()), rank), parameters_of(model)


def ddp_hooks(rank, _size):
    """Gradients as 16-bit floats, and an optimizer whose states the ranks share out."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    return train(model, optimizer, rank), parameters_of(model)


def sharded(size):
    from torch.distributed.fsdp import fully_shard

    model, mesh = make(), init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(rank, size):
    model = sharded(size)
    return train(model, optimizer_of(model.parameters()), rank), parameters_of(model)


def tensor_parallel(_rank, size):
    """All ranks share the layers of one model and have the same data."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = make(), init_device_mesh("cpu", (size,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, optimizer_of(model.parameters()), 0), parameters_of(model)


class Stage(torch.nn.Module):
    """A part of a model: what comes first, or last, or only one of as many layers as there are ranks."""

    def __init__(self, index, size):
        super().__init__()
        torch.manual_seed(index)
        self.first = torch.nn.Embedding(WORDS, WIDTH) if index == 0 else None
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, WORDS) if index == size - 1 else None

    def forward(self, x):
        x = x if self.first is None else self.first(x)
        x = torch.tanh(self.layer(x))
        return x if self.last is None else self.last(x)


def pipeline(rank, size):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = Stage(rank, size)
    optimizer = optimizer_of(part.parameters())

    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1))

    schedule = Schedule1F1B(PipelineStage(part, rank, size, torch.device("cpu")), BATCH, loss_fn=loss)
    losses = []
    for step in range(STEPS):
        sequences, parts = words(0, step), []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(sequences[:, :-1])
        elif rank == size - 1:
            schedule.step(target=sequences[:, 1:], losses=parts)
        else:
            schedule.step()
        optimizer.step()
        losses += [part.item() for part in parts]
    return losses, parameters_of(part)


def checkpoint(rank, size):
    """Half of the steps, a distributed checkpoint, and the other half from it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = str(Path(sys.argv[2]) / "checkpoint")

    def half(first, model, optimizer):
        losses = []
        for step in range(first, first + STEPS // 2):
            loss = loss_of(model, words(rank, step))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = sharded(size)
    optimizer = optimizer_of(model.parameters())
    losses = half(0, model, optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    saved = parameters_of(model)

    model = sharded(size)
    optimizer = optimizer_of(model.parameters())
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1]}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(torch.equal(whole(p), saved[name]) for name, p in model.named_parameters()), "not what was saved"
    return losses + half(STEPS // 2, model, optimizer), parameters_of(model)


def main():
    backend, folder, *ways = sys.argv[1:]
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for way in ways:
        losses, parameters = globals()[way](rank, size)
        torch.save({"losses": losses, "parameters": parameters}, Path(folder) / f"{way}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
