"""Trains a layer of experts with DeepSpeed's mixture of experts, each rank with its own, and saves losses and parameters.

usage: torchrun --nproc-per-node N moe.py BACKEND FOLDER

With the backend "mcr_dl" DeepSpeed's collectives go by mcr_dl: all-to-alls by another backend than the rest, as in MCR-DL's DS-MoE.
"""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

WIDTH, TOKENS, STEPS = 16, 24, 4


class Model(torch.nn.Module):
    """A linear layer, experts, and another linear layer."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH))
        self.experts = MoE(WIDTH, expert, num_experts=size, ep_size=size, k=1, capacity_factor=2.0, use_rts=False)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        hidden, balance, _counts = self.experts(torch.tanh(self.first(x)))
        return self.last(hidden), balance


def main():
    backend, folder = sys.argv[1:]
    calls = {}
    if backend == "mcr_dl":
        from strata.mcr_dl.deepspeed import init_distributed

        calls = init_distributed(["nccl", "gloo"], {"all_to_all_single": "gloo", "all_reduce": "nccl"}).calls
    else:
        deepspeed.init_distributed(dist_backend=backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model(size)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": TOKENS, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(groups, lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))
        outputs, balance = engine(inputs)
        loss = (outputs - inputs.sum(1, keepdim=True)).pow(2).mean() + 0.01 * balance
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    parameters = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    torch.save({"losses": losses, "parameters": parameters}, Path(folder) / f"moe-{rank}.pt")
    if calls:
        torch.save(dict(calls), Path(folder) / f"calls-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
