"""PyTorch over Strata against PyTorch over gloo: collectives and training steps. scripts/bench-torch starts it.

usage: pytorch.py RANKS PART,... [netns]     starts the ranks, on this machine or on two nodes, and prints a table

A time is that of the slowest rank. Both libraries take turns within one process; with DeepSpeed, whose groups are the
process's, in processes one after another. Printed are medians with their quartiles, and the ratio of the medians. The size of
a collective is that of its larger buffer.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python" / "tests"))

BACKENDS = ("gloo", "strata")
# Bytes, calls in a round, rounds.
SIZES = [(1 << 10, 50, 15), (64 << 10, 20, 15), (1 << 20, 5, 15), (16 << 20, 1, 11), (64 << 20, 1, 7)]
STEPS, WARM = 15, 3


def collectives(dist, torch, groups, size):
    """Rows (name, {backend: seconds of each round})."""

    def calls(name, total):
        whole, part = torch.ones(total // 4), torch.ones(total // 4 // size)
        return {
            "all_reduce": lambda group: dist.all_reduce(whole, group=group),
            "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        }[name]

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        for total, count, rounds in SIZES:
            call, times = calls(name, total), {backend: [] for backend in BACKENDS}
            for turn in range(WARM + rounds):
                for backend in BACKENDS:
                    dist.barrier()
                    begin = time.perf_counter()
                    for _ in range(count):
                        call(groups[backend])
                    if turn >= WARM:
                        times[backend].append((time.perf_counter() - begin) / count)
            yield f"{name} {total >> 10} KB", times


def model_of(torch):
    """A transformer of 9 million parameters."""
    nn = torch.nn
    torch.manual_seed(1)
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(6)]
    return nn.Sequential(nn.Embedding(8192, 256), *layers, nn.Linear(256, 8192))


def batch_of(torch, rank):
    words = torch.randint(8192, (2, 33), generator=torch.Generator().manual_seed(rank))
    return words[:, :-1], words[:, 1:].reshape(-1)


def plain_step(torch, model, rank):
    """One step of a model under DDP or FSDP2, as a function."""
    inputs, targets = batch_of(torch, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets).backward()
        optimizer.step()

    return step


def step_of(torch, way, group, rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(torch)
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model[1:-1]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return plain_step(torch, model, rank)


def zero_step(torch, stage, rank):
    import deepspeed

    inputs, targets = batch_of(torch, rank)
    model = model_of(torch)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step():
        engine.backward(torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), targets))
        engine.step()

    return step


def timed(dist, steps):
    """Seconds of each round, by backend; the steps take turns."""
    times = {backend: [] for backend in steps}
    for turn in range(WARM + STEPS):
        for backend, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if turn >= WARM:
                times[backend].append(time.perf_counter() - begin)
    return times


def rank_main(file, part, *backends):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if part.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed(dist_backend=backends[0])
        rank = dist.get_rank()
        rows = [(part, timed(dist, {backends[0]: zero_step(torch, int(part[4:]), rank)}))]
    else:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
        if part == "collectives":
            rows = list(collectives(dist, torch, groups, size))
        else:
            rows = [(part, timed(dist, {backend: step_of(torch, part, groups[backend], rank) for backend in BACKENDS}))]
    slowest = []
    for name, times in rows:
        for backend, seconds in times.items():
            most = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            slowest.append((name, backend, most.tolist()))
    if rank == 0:
        Path(file).write_text(json.dumps(slowest))
    dist.destroy_process_group()


def launcher(count, netns):
    """The command that starts the ranks."""
    if netns:
        cluster = str(Path(__file__).resolve().parents[1] / "scripts" / "netns-cluster")
        nodes = ["--name", "bench-torch", "--nodes", "2", "--ranks", str(count // 2), "--rate", "1gbit"]
        return [cluster, "with", *nodes, "--each", "rank", "--", sys.executable]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return [*agent, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


def started(count, netns, part, *backends):
    """Runs the ranks; what they have measured, as rows of name, backend and seconds."""
    import ranks

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "times")
        line = [*launcher(count, netns), __file__, file, part, *backends]
        environment = dict(ranks.environment(), **({"GLOO_SOCKET_IFNAME": "eth0"} if netns else {}))
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(line)} failed\n{done.stdout}{done.stderr}")
        return json.loads(Path(file).read_text())


def shown(seconds):
    """The median with its quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    digits = 3 if middle < 0.01 else 1
    return f"{1e3 * middle:.{digits}f} ({1e3 * low:.{digits}f} to {1e3 * high:.{digits}f})"


def main(count, parts, netns=""):
    count = int(count)
    where = " on two nodes with a NIC of 1 Gbit/s each" if netns else ""
    print(f"\n{count} ranks{where}; milliseconds, median (quartiles)")
    print(f"{'':24} {'gloo':>28} {'Strata':>28} {'gloo / Strata':>14}", flush=True)
    for part in parts.split(","):
        if part.startswith("zero"):
            rows = [row for _turn in range(2) for backend in BACKENDS for row in started(count, netns, part, backend)]
        else:
            rows = started(count, netns, part)
        times = {}
        for name, backend, seconds in rows:
            times.setdefault(name, {}).setdefault(backend, []).extend(seconds)
        for name, both in times.items():
            ratio = statistics.median(both["gloo"]) / statistics.median(both["strata"])
            print(f"{name:24} {shown(both['gloo']):>28} {shown(both['strata']):>28} {ratio:14.2f}", flush=True)


if __name__ == "__main__":
    (rank_main if "RANK" in os.environ else main)(*sys.argv[1:])
