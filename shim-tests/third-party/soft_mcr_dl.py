"""mcr_dl on soft GPUs, with unchanged PyTorch: each element of every result is compared.

One rank of a job, as `strata launch` starts it: soft_mcr_dl.py FIRST COUNT. Says of each rank `SEEDS seeds, CALLS calls, WRONG wrong
results`. A seed chooses calls, types, lengths, streams, and the order in which the streams of the soft GPU do their work.
"""

import ctypes
import os
import random
import sys

import mcr_dl
import torch

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
OP = mcr_dl.ReduceOp
OPERATIONS = {OP.SUM: lambda parts: parts.sum(0), OP.MAX: lambda parts: parts.amax(0), OP.MIN: lambda parts: parts.amin(0)}


class Program:
    """The calls of one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seed, self.calls, self.wrong = seed, 0, []
        self.rank, self.size = mcr_dl.get_rank(), mcr_dl.get_size()
        self.waiting = []

    def numbers(self, rank, count, dtype):
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * self.calls + rank)
        return torch.randint(0, 4, (count,), generator=generator).to(dtype)

    def check(self, what, result, expected):
        """Compares a result in the order of the current stream."""
        found = result.cpu()
        if not torch.equal(found, expected):
            self.wrong.append(f"seed {self.seed}, {what}: {found.tolist()[:8]} and not {expected.tolist()[:8]}")

    def run(self, calls):
        """So many calls, some queued; those are checked later, in another order on each rank."""
        own = random.Random(7 * self.seed + self.rank)
        for _ in range(calls):
            self.one()
        own.shuffle(self.waiting)
        for what, work, result, expected in self.waiting:
            work.wait()
            self.check(what, result, expected)
        self.waiting = []

    def one(self):
        draw, rank, size = self.random, self.rank, self.size
        count, dtype, backend = draw.choice([1, 5, 700, 40000]), draw.choice(DTYPES), draw.choice(["nccl", "gloo", "auto"])
        later, root, kind = draw.random() < 0.5, draw.randrange(size), draw.randrange(8)
        given = [self.numbers(r, count, dtype) for r in range(size)]
        whole = [self.numbers(r, size * count, dtype) for r in range(size)]
        counts = [draw.choice([0, draw.randint(0, count)]) for _ in range(size)]
        mine, empty = given[rank].cuda(), torch.zeros(size * count, dtype=dtype).cuda()
        self.calls += 1
        if kind < 2:
            op = draw.choice(list(OPERATIONS))
            expected = OPERATIONS[op](torch.stack(given)).to(dtype)
            work, result = mcr_dl.all_reduce(backend, mine, op, later), mine
        elif kind == 2:
            work, result, expected = mcr_dl.bcast(backend, mine, root, later), mine, given[root]
        elif kind == 3:
            work, result, expected = mcr_dl.all_gather(backend, empty, mine, later), empty, torch.cat(given)
        elif kind == 4:
            source = whole[rank].cuda()
            work, result = mcr_dl.all_to_all_single(backend, empty, source, later), empty
            expected = torch.cat([part[rank * count : (rank + 1) * count] for part in whole])
        elif kind == 5:
            source, result = whole[rank].cuda(), torch.zeros(count, dtype=dtype).cuda()
            work = mcr_dl.reduce_scatter(backend, result, None, OP.MAX, later, input=source)
            expected = torch.stack(whole).amax(0)[rank * count : (rank + 1) * count].to(dtype)
        elif kind == 6:
            expected = torch.cat([given[r][: counts[r]] for r in range(size)])
            result, source = torch.zeros(len(expected), dtype=dtype).cuda(), mine[: counts[rank]].clone()
            work = mcr_dl.all_gatherv(backend, result, None, counts, None, later, input=source)
        else:
            work = mcr_dl.reduce(backend, mine, root, OP.SUM, later)
            result, expected = mine, torch.stack(given).sum(0).to(dtype) if rank == root else given[rank]
        what = f"call {self.calls}, kind {kind} of {count} {dtype} by {backend}, later={later}"
        if later:
            self.waiting.append((what, work, result, expected))
        else:
            self.check(what, result, expected)


def refused(kind, words, call):
    """What is wrong with a call that is not refused as it should be; nothing, if it is."""
    try:
        call()
    except kind as error:
        return [] if all(word in str(error) for word in words) else [f"the message lacks one of {words}: {error}"]
    return [f"no exception, where one with {words} was due"]


def main():
    first, count = map(int, sys.argv[1:3])
    soft = ctypes.CDLL("libcuda.so.1")
    torch.cuda.set_device(0)
    mcr_dl.init(["nccl", "gloo"], timeout=120, device="cuda")
    calls, wrong = 0, []
    for seed in range(first, first + count):
        soft.softgpuSeed(seed)
        program = Program(seed)
        with torch.cuda.stream(torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()):
            program.run(12)
        calls, wrong = calls + program.calls, wrong + program.wrong
    host = torch.ones(3)
    mcr_dl.all_reduce("nccl", host)
    wrong += [] if host.tolist() == [mcr_dl.get_size()] * 3 else ["host memory beside the GPU's"]
    device, many = torch.ones(3).cuda(), torch.ones(3 * mcr_dl.get_size())
    wrong += refused(ValueError, ["cpu and cuda:0"], lambda: mcr_dl.all_gather("nccl", many, device))
    wrong += refused(ValueError, ["contiguous"], lambda: mcr_dl.all_reduce("nccl", torch.ones(4, 2).cuda().t()))
    mcr_dl.finalize()
    mcr_dl.init("nccl", timeout=120, device="cpu")
    wrong += refused(TypeError, ["cuda:0", "processors"], lambda: mcr_dl.all_reduce("nccl", device))
    mcr_dl.synchronize()
    # At once, so that ranks do not write into each other's lines.
    os.write(1, f"rank {mcr_dl.get_rank()}: {count} seeds, {calls} calls, {len(wrong)} wrong results\n".encode())
    for line in wrong[:5]:
        print(line, file=sys.stderr)
    mcr_dl.finalize()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
