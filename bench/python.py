"""What Python costs over C: the same call by a loop of C, by mcr_dl, and by torch.distributed over Strata (MCR-DL's Figure 7).

usage: python.py LIBRARY [TURNS]     under `strata launch`; scripts/bench-python starts it

LIBRARY is bench/python.c, built. All of it runs in one process for each rank. C and mcr_dl use one communicator and the same buffers;
torch.distributed has a group of its own. They take turns; a turn is a barrier, then a number of calls one after another. Printed are
rank 0's medians a call, and the median over turns of the time that is added to C's of the same turn, with its quartiles, in percent.
"""

import ctypes
import statistics
import sys
import time

import mcr_dl
import numpy as np
import torch
import torch.distributed as dist

import strata.torch  # noqa: F401
from strata import _lib

SIZES = [8, 64, 512, 1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
# A turn takes about so long, in seconds.
TURN = 0.01
MAX = mcr_dl.ReduceOp.MAX


def loops(collective, size, library, comm):
    """A function `seconds(number)` of each way, for buffers of so many bytes."""
    ranks = mcr_dl.get_size()
    count = max(size // 4 // ranks, 1) * ranks
    source, target = torch.ones(count), torch.ones(count)
    arrays = source.numpy(), target.numpy()
    places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, target)]

    def in_python(call):
        def seconds(number):
            start = time.perf_counter()
            for _ in range(number):
                call()
            return time.perf_counter() - start

        return seconds

    if collective == "all_reduce":
        function, arguments = "ncclAllReduce", (places[1], ctypes.c_size_t(count))
        calls = {
            "mcr_dl, NumPy": lambda: mcr_dl.all_reduce("nccl", arrays[1], MAX),
            "mcr_dl": lambda: mcr_dl.all_reduce("nccl", target, MAX),
            "torch": lambda: dist.all_reduce(target, dist.ReduceOp.MAX),
        }
    else:
        function, arguments = "ncclAlltoAll", (*places, ctypes.c_size_t(count // ranks))
        calls = {
            "mcr_dl, NumPy": lambda: mcr_dl.all_to_all_single("nccl", arrays[1], arrays[0]),
            "mcr_dl": lambda: mcr_dl.all_to_all_single("nccl", target, source),
            "torch": lambda: dist.all_to_all_single(target, source),
        }
    loop = getattr(library, f"bench_{collective}")
    loop.restype = ctypes.c_double
    entry = ctypes.cast(_lib.lib[function], ctypes.c_void_p)

    def in_c(number):
        taken = loop(entry, *arguments, comm, number)
        if taken < 0:
            raise RuntimeError("a call in C has failed")
        return taken

    return {"C": in_c, **{way: in_python(call) for way, call in calls.items()}}


def measured(ways, turns):
    """Seconds a call of each way, turn by turn."""
    number = 1
    while True:
        dist.barrier()
        taken = torch.tensor([ways["C"](number)])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if taken.item() >= TURN or number >= 1 << 16:
            break
        number *= 2
    times = {way: [] for way in ways}
    for turn in range(turns + 2):
        for way, seconds in ways.items():
            dist.barrier()
            mcr_dl.all_reduce("nccl", np.zeros(1))
            each = seconds(number) / number
            if turn >= 2:
                times[way].append(each)
    return times


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:7.1f} ({low:.1f} to {high:.1f})"


def main():
    library, turns = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 21
    torch.set_num_threads(1)
    dist.init_process_group("strata")
    mcr_dl.init("nccl")
    comm = mcr_dl._world._backends.find("nccl").lane.comm
    rank, size = mcr_dl.get_rank(), mcr_dl.get_size()
    if rank == 0:
        print(f"# {size} ranks, {turns} turns; us a call; % over C of the same turn: median (quartiles)")
    for collective in ("all_to_all", "all_reduce"):
        if rank == 0:
            print(f"{collective:<12} {'C':>9}", *(f"{way:>12} {'%':>24}" for way in ("mcr_dl", "mcr_dl, NumPy", "torch")))
        for bytes_each in SIZES:
            times = measured(loops(collective, bytes_each, library, comm), turns)
            if rank:
                continue
            line = f"{bytes_each:<12} {1e6 * statistics.median(times['C']):9.2f}"
            for way in ("mcr_dl", "mcr_dl, NumPy", "torch"):
                over = [100 * (mine / c - 1) for mine, c in zip(times[way], times["C"])]
                line += f" {1e6 * statistics.median(times[way]):12.2f} {quartiles(over):>24}"
            print(line, flush=True)
    mcr_dl.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
