"""One rank: times all-gather, reduce-scatter and all-reduce of several sizes, and checks what they give.

A size is that of the whole vector. Two times are taken of every call: until it returns to the program, and until its result
is there. Results are whole numbers small enough for any order of adding to give the same bits."""

import time

import torch
import torch.distributed as dist
from rank import Rank

# Calls that are timed, at most and at least.
MOST, LEAST = 20, 3
# Calls in a row, whose returns are timed with the stream still busy.
IN_A_ROW = 50
# Elements that are checked at once, so that a check takes little memory.
PIECE = 16 << 20


def numbers(start, count, rank, device):
    """What rank `rank` has in its elements from `start` on."""
    places = torch.arange(start, start + count, device=device, dtype=torch.int64)
    return ((places % 251) + 7 * rank).to(torch.float32)


def fill(tensor, rank, device):
    for start in range(0, tensor.numel(), PIECE):
        part = tensor[start:start + PIECE]
        part.copy_(numbers(start, part.numel(), rank, device))


def buffers(name, elements, rank):
    """Input and output for a vector of so many elements."""
    block = elements // rank.count
    sizes = {"all_gather": (block, elements), "reduce_scatter": (elements, block), "all_reduce": (elements, elements)}
    source = torch.empty(sizes[name][0], device=rank.device)
    result = source if name == "all_reduce" else torch.empty(sizes[name][1], device=rank.device)
    fill(source, rank.index, rank.device)
    return source, result


def call(name, source, result):
    if name == "all_gather":
        dist.all_gather_into_tensor(result, source)
    elif name == "reduce_scatter":
        dist.reduce_scatter_tensor(result, source)
    else:
        dist.all_reduce(result)


def is_right(name, result, rank):
    ranks, block = rank.count, result.numel() // rank.count
    for start in range(0, result.numel(), PIECE):
        part = result[start:start + PIECE]
        if name == "all_gather":
            owners = torch.arange(start, start + part.numel(), device=rank.device) // block
            places = torch.arange(start, start + part.numel(), device=rank.device) % block
            wanted = ((places % 251) + 7 * owners).to(torch.float32)
        else:
            first = start + (rank.index * result.numel() if name == "reduce_scatter" else 0)
            own = numbers(first, part.numel(), 0, rank.device)
            wanted = own * ranks + 7 * (ranks * (ranks - 1) // 2)
        if not torch.equal(part, wanted):
            return False
    return True


def once(name, source, result, rank):
    """Microseconds until the call returned, and until its result was there."""
    start = time.perf_counter()
    call(name, source, result)
    returned = time.perf_counter()
    rank.synchronize()
    return (returned - start) * 1e6, (time.perf_counter() - start) * 1e6


def measure(name, size, rank, seconds):
    elements = size // 4 // rank.count * rank.count
    source, result = buffers(name, elements, rank)
    call(name, source, result)
    rank.synchronize()
    right = is_right(name, result, rank)
    took = once(name, source, result, rank)[1]
    calls = rank.agree(f"{name} {size}", max(LEAST, min(MOST, int(seconds * 1e6 / max(took, 1.0)))))
    times = [once(name, source, result, rank) for _ in range(calls)]
    host, whole = [sorted(kind) for kind in zip(*times)]
    return {
        "collective": name, "bytes": elements * 4, "calls": calls, "right": right, "median_us": whole[calls // 2],
        "min_us": whole[0], "max_us": whole[-1], "host_median_us": host[calls // 2], "host_max_us": host[-1],
    }


def in_a_row(name, rank):
    """How long calls take to return when they are made one after the other, without waiting: median and 99th percentile."""
    source, result = buffers(name, (1 << 20) // 4, rank)
    times = []
    for _ in range(IN_A_ROW):
        start = time.perf_counter()
        call(name, source, result)
        times.append((time.perf_counter() - start) * 1e6)
    rank.synchronize()
    times.sort()
    return {"collective": name, "median_us": times[IN_A_ROW // 2], "p99_us": times[IN_A_ROW * 99 // 100]}


def main():
    rank = Rank()
    names, sizes, seconds = rank.job["collectives"], rank.job["sizes"], rank.job["seconds"]
    start = time.monotonic()
    rows, took = [], {}
    for size in sizes:
        for name in names:
            # A larger vector takes longer in proportion. All ranks go on or none.
            expected = took[name][1] * size / took[name][0] if name in took else 0.0
            begun = time.monotonic()
            if rank.agree(f"go on {name} {size}", begun - start + expected < seconds):
                rows.append(measure(name, size, rank, rank.job["seconds_each"]))
                took[name] = (size, time.monotonic() - begun)
            if not rank.cpu:
                torch.cuda.empty_cache()
    calls = [in_a_row(name, rank) for name in names]
    rank.leave({"rows": rows, "calls": calls})


main()
