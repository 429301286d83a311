"""Strata against PyTorch's gloo on one machine, in turns in the same processes, as bench/host.c does it with MPI.

usage: gloo.py [--ranks 2] [--mode processes|tcp] [--collectives NAME,..] [--sizes 8,64K,..] [--memory malloc,nccl]
               [--seconds PER_CELL] [--warm] [--busy N]

Gloo is called as users call it, by torch.distributed; Strata's C interface by ctypes. Both wait at the barrier of bench/turns.h,
asleep. STRATA_LIBRARY names libnccl.so.2, BENCH_TURNS the library of bench/turns.c. Rows are those of bench/host.c. The tensors
that gloo reduces in place are zeros while it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FLOAT, SUM, ID_BYTES = 7, 0, 128
NAMES = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "gather", "scatter", "ping_pong"]
IN_BLOCKS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
FEWEST, FEWEST_LONG, MOST = 5, 3, 201

Call = Callable[[], Any]


class Shared:
    """What the processes share: the barrier, the id of Strata's communicator and a time for each rank."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        self.turns = ctypes.CDLL(os.environ["BENCH_TURNS"])
        self.rank, self.ranks = rank, ranks
        self.renew: Call = lambda: None  # Writes anew what is sent.
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 4096)
        at = self.turns.bench_barrier_bytes()
        self.barrier = (ctypes.c_char * at).from_buffer(self.memory)
        self.id = (ctypes.c_char * ID_BYTES).from_buffer(self.memory, at)
        self.seconds = (ctypes.c_double * ranks).from_buffer(self.memory, at + ID_BYTES)

    def meet(self) -> None:
        """Ranks that wait sleep: gloo has threads of its own, which need the processors."""
        self.turns.bench_meet(self.barrier, self.ranks, 1)

    def timed(self, call: Call, repeat: int) -> float:
        """Seconds of one call, of the slowest rank."""
        self.renew()
        self.meet()
        begin = time.perf_counter()
        for _ in range(repeat):
            call()
        self.seconds[self.rank] = (time.perf_counter() - begin) / repeat
        self.meet()
        return max(self.seconds)


class Strata:
    """The functions of libnccl.so.2, each of which returns 0 or is an error."""

    def __init__(self, shared: Shared) -> None:
        class UniqueId(ctypes.Structure):
            _fields_ = [("internal", ctypes.c_char * ID_BYTES)]

        self.library = ctypes.CDLL(os.environ["STRATA_LIBRARY"])
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        if shared.rank == 0:
            self.check(self.library.ncclGetUniqueId(shared.id))
        shared.meet()
        self.comm = ctypes.c_void_p()
        unique = UniqueId.from_buffer_copy(shared.id)
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.comm), shared.ranks, unique, shared.rank))

    def check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(self.library.ncclGetLastError(None).decode())

    def memory(self, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self.check(self.library.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
        return pointer

    def call(self, name: str, rank: int, send: int, recv: int, count: int, block: int) -> Call:
        """The collective as a function without arguments."""
        library, comm, null, check = self.library, self.comm, ctypes.c_void_p(), self.check
        source, to = ctypes.c_void_p(send), ctypes.c_void_p(recv)
        both = source if rank == 0 else to
        whole, part = ctypes.c_size_t(count), ctypes.c_size_t(block)
        partner = (whole, FLOAT, 1 - rank, comm, null)

        def ping_pong() -> None:
            if rank == 0:
                check(library.ncclSend(source, *partner))
            if rank <= 1:
                check(library.ncclRecv(to, *partner))
            if rank == 1:
                check(library.ncclSend(source, *partner))

        calls: dict[str, Call] = {
            "all_gather": lambda: check(library.ncclAllGather(source, to, part, FLOAT, comm, null)),
            "reduce_scatter": lambda: check(library.ncclReduceScatter(source, to, part, FLOAT, SUM, comm, null)),
            "all_reduce": lambda: check(library.ncclAllReduce(source, to, whole, FLOAT, SUM, comm, null)),
            "broadcast": lambda: check(library.ncclBroadcast(both, both, whole, FLOAT, 0, comm, null)),
            "reduce": lambda: check(library.ncclReduce(source, to, whole, FLOAT, SUM, 0, comm, null)),
            "all_to_all": lambda: check(library.ncclAlltoAll(source, to, part, FLOAT, comm, null)),
            "gather": lambda: check(library.ncclGather(source, to, part, FLOAT, 0, comm, null)),
            "scatter": lambda: check(library.ncclScatter(source, to, part, FLOAT, 0, comm, null)),
            "ping_pong": ping_pong,
        }
        return calls[name]


def gloo_call(dist: Any, name: str, rank: int, ranks: int, send: Any, recv: Any) -> Call:
    """The collective as torch.distributed has it; what gloo does in place is done in `recv`."""
    whole, part = send, recv[: len(send) // ranks]
    first = send[: len(send) // ranks]
    blocks = list((recv if name == "gather" else send).chunk(ranks)) if rank == 0 and name in ("gather", "scatter") else None

    def ping_pong() -> None:
        if rank == 0:
            dist.send(send, 1)
        if rank <= 1:
            dist.recv(recv, 1 - rank)
        if rank == 1:
            dist.send(send, 0)

    calls: dict[str, Call] = {
        "all_gather": lambda: dist.all_gather_into_tensor(recv, first),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_reduce": lambda: dist.all_reduce(recv),
        "broadcast": lambda: dist.broadcast(send if rank == 0 else recv, 0),
        "reduce": lambda: dist.reduce(recv, 0),
        "all_to_all": lambda: dist.all_to_all_single(recv, whole),
        "gather": lambda: dist.gather(first, blocks, 0),
        "scatter": lambda: dist.scatter(part, blocks, 0),
        "ping_pong": ping_pong,
    }
    return calls[name]


def elements(torch: Any, ranks: Iterable[int], count: int, offset: int = 0) -> Any:
    """The sum of what ranks send: small whole numbers, whose sums floats hold exactly, which come again after 1024."""
    first = sum(((torch.arange(offset, offset + 1024) * 7 + rank * 13) % 1024).float() for rank in ranks)
    return first.repeat(-(-count // 1024))[:count]


def expected(torch: Any, name: str, rank: int, ranks: int, count: int) -> Any:
    """What the rank must have received, or None."""
    block = count // ranks
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        if name == "reduce" and rank != 0:
            return None
        n, offset = (block, rank * block) if name == "reduce_scatter" else (count, 0)
        return elements(torch, range(ranks), n, offset)
    if name == "all_gather" or (name == "gather" and rank == 0):
        return torch.cat([elements(torch, [r], block) for r in range(ranks)])
    if name == "all_to_all":
        return torch.cat([elements(torch, [r], block, rank * block) for r in range(ranks)])
    if name == "scatter":
        return elements(torch, [0], block, rank * block)
    if name == "broadcast" and rank != 0:
        return elements(torch, [0], count)
    if name == "ping_pong" and rank <= 1:
        return elements(torch, [1 - rank], count)
    return None


def quartiles(values: list[float], scale: float) -> str:
    ordered, n = sorted(values), len(values)
    return ",".join(f"{scale * ordered[i]:.3f}" for i in (n // 4, n // 2, n * 3 // 4))


class Cell:
    """A collective of a size on one kind of memory: checked once, then timed in turns."""

    def __init__(self, name: str, size: int, shared: Shared, ours: Call, theirs: Call) -> None:
        self.name, self.size, self.shared, self.calls = name, size, shared, (ours, theirs)

    def checked(self, torch: Any, ours: Any, theirs: Any, send: Any) -> None:
        wanted = expected(torch, self.name, self.shared.rank, self.shared.ranks, self.size // 4)
        for whose, call, recv in zip(("Strata", "gloo"), self.calls, (ours, theirs), strict=True):
            recv.copy_(send)  # Gloo reduces in place.
            self.shared.meet()
            call()
            self.shared.meet()
            if wanted is not None and not torch.equal(recv[: len(wanted)], wanted):
                sys.exit(f"rank {self.shared.rank}: {self.name} of {self.size} bytes by {whose} is wrong")
            recv.zero_()

    def timed(self, seconds: float) -> str:
        """The row's numbers."""
        timed = self.shared.timed
        most = 50 if self.size <= 4096 else 20 if self.size <= 65536 else 4 if self.size <= 1 << 20 else 1
        lasts = sum(timed(call, 1) for call in self.calls) > 0.5
        guesses = [statistics.median(timed(call, 1) for _ in range(1 if lasts else 3)) for call in self.calls]
        repeat = max(1, min(most, int(5e-3 / max(guesses))))
        if repeat > 1:
            guesses = [timed(call, repeat) for call in self.calls]
        fit = int(seconds / (sum(guesses) * repeat + 1e-6))
        iterations = max(FEWEST_LONG if lasts else FEWEST, min(MOST, fit))
        pairs = [(timed(self.calls[0], repeat), timed(self.calls[1], repeat)) for _ in range(iterations)]
        scale = 0.5e6 if self.name == "ping_pong" else 1e6
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ratios = [their / our for our, their in pairs]
        return f"{iterations},{repeat},{quartiles(ours, scale)},{quartiles(theirs, scale)},{quartiles(ratios, 1)}"


def bytes_of(text: str) -> int:
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1])
    return int(text) if unit is None else int(text[:-1]) << unit


def sizes_of(name: str, text: str, ranks: int) -> list[int]:
    """Whole floats, at least one for each block."""
    unit = 4 * ranks if name in IN_BLOCKS else 4
    return list(dict.fromkeys(-(-bytes_of(size) // unit) * unit for size in text.split(",")))


def tensor_at(torch: Any, pointer: int, count: int) -> Any:
    return torch.frombuffer((ctypes.c_float * count).from_address(pointer), dtype=torch.float32)


def renewal(tensors: list[Any]) -> Call:
    """A function that writes the cache lines of the tensors without changing them."""
    lines = [tensor[::16] for tensor in tensors]

    def write() -> None:
        for line in lines:
            line.mul_(1)

    return write


def rank_main(options: argparse.Namespace, rank: int, path: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    shared = Shared(path, rank, options.ranks)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=options.ranks)
    strata = Strata(shared)
    largest = max(size for name in NAMES for size in sizes_of(name, options.sizes, options.ranks))
    count = largest // 4
    send, recv = elements(torch, [rank], count), torch.zeros(count)
    for memory in options.memory.split(","):
        pointers = [strata.memory(largest) for _ in range(2)] if memory == "nccl" else []
        ours = [tensor_at(torch, pointer.value or 0, count) for pointer in pointers] or [send, recv]
        ours[0].copy_(send)
        ours[1].zero_()
        for name in NAMES:
            if options.collectives and name not in options.collectives.split(","):
                continue
            for size in sizes_of(name, options.sizes, options.ranks):
                n = size // 4
                mine = strata.call(name, rank, ours[0].data_ptr(), ours[1].data_ptr(), n, n // options.ranks)
                theirs = gloo_call(dist, name, rank, options.ranks, send[:n], recv[:n])
                cell = Cell(name, size, shared, mine, theirs)
                cell.checked(torch, ours[1][:n], recv[:n], send[:n])
                shared.renew = renewal([] if options.warm else [ours[0][:n], send[:n]])
                numbers = cell.timed(options.seconds)
                if rank == 0:
                    print(f"gloo,{options.mode},{options.ranks},{options.busy},{name},{memory},{size},{numbers}", flush=True)
        del ours
        for pointer in pointers:
            strata.check(strata.library.ncclMemFree(pointer))
    strata.check(strata.library.ncclCommDestroy(strata.comm))
    dist.destroy_process_group()


def start_ranks(options: argparse.Namespace) -> int:
    """Starts a process for each rank; when one fails, the others are ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "shared")
        Path(path).write_bytes(bytes(4096))
        # PyTorch brings NCCL along, in front of which Strata would stand.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "STRATA_NCCL_LIB": "none"}
        if options.mode == "tcp":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        ranks = []
        for rank in range(options.ranks):
            node = {"NCCL_HOSTID": f"bench.{rank}"} if options.mode == "tcp" else {}
            command = [sys.executable, *sys.argv, "--rank", f"{rank}:{path}"]
            ranks.append(subprocess.Popen(command, env=environment | node))
        waiting, status = list(ranks), 0
        while waiting and status == 0:
            try:
                waiting[0].wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                pass
            waiting, ended = [r for r in waiting if r.poll() is None], [r.returncode for r in ranks if r.poll() is not None]
            status = next((code for code in ended if code != 0), 0)
        for process in waiting:
            process.kill()
            process.wait()
        return status


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mode", choices=["processes", "tcp"], default="processes")
    parser.add_argument("--collectives", default="")
    parser.add_argument("--sizes", default="8,128,1K,8K,64K,512K,4M,32M,256M")
    parser.add_argument("--memory", default="malloc,nccl")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, path = options.rank.split(":", maxsplit=1)
        rank_main(options, int(rank), path)
    else:
        sys.exit(start_ranks(options))


if __name__ == "__main__":
    main()
