"""Trains a small transformer with DeepSpeed's ZeRO, and saves losses and parameters.

usage: torchrun --nproc-per-node N zero.py BACKEND FOLDER STAGE...

With the backend "mcr_dl" DeepSpeed's collectives go by mcr_dl, over two backends of its.
"""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from model import BATCH, STEPS, loss_of, make, optimizer_of, words


def zero(stage, rank):
    """Losses and parameters after the steps of one stage."""
    model = make()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = optimizer_of(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, words(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        parameters = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return losses, parameters


def main():
    backend, folder, *stages = sys.argv[1:]
    calls = {}
    if backend == "mcr_dl":
        from strata.mcr_dl.deepspeed import init_distributed

        calls = init_distributed(["nccl", "gloo"], {"all_gather_into_tensor": "gloo", "all_reduce": "nccl"}).calls
    else:
        deepspeed.init_distributed(dist_backend=backend)
    rank = dist.get_rank()
    for stage in stages:
        losses, parameters = zero(int(stage), rank)
        torch.save({"losses": losses, "parameters": parameters}, Path(folder) / f"zero{stage}-{rank}.pt")
    if calls:
        torch.save(dict(calls), Path(folder) / f"calls-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
