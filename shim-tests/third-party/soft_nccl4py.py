"""NVIDIA's nccl4py over Strata on soft GPUs: each element of every result is compared.

One rank of a job, as torchrun or `strata launch` starts it: soft_nccl4py.py FILE FIRST COUNT, where the ranks find the
unique id in FILE, and run programs of COUNT seeds.
"""

import ctypes
import os
import random
import sys
import time

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from nccl import core as nccl

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TYPES = [np.float32, np.float64, np.float16, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]
OPERATIONS = {
    nccl.SUM: lambda parts: parts.sum(0),
    nccl.PROD: lambda parts: parts.prod(0),
    nccl.MIN: lambda parts: parts.min(0),
    nccl.MAX: lambda parts: parts.max(0),
}


def done(answer):
    """What a call of the driver gives, if it succeeds."""
    code, *values = answer
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return values[0] if values else None


class Array:
    """An array on the device, as `__cuda_array_interface__` describes it."""

    def __init__(self, stream, count, dtype, numbers=None):
        self.stream, self.count, self.dtype = stream, count, np.dtype(dtype)
        self.address = int(done(driver.cuMemAlloc(max(1, count * self.dtype.itemsize))))
        # What is pageable has been read when the call returns.
        if numbers is not None:
            done(driver.cuMemcpyHtoDAsync(self.address, numbers.ctypes.data, numbers.nbytes, int(stream.handle)))
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": self.dtype.str, "data": (self.address, False), "version": 3,
            "stream": int(stream.handle),
        }

    def numbers(self):
        found = np.empty(self.count, self.dtype)
        done(driver.cuMemcpyDtoHAsync(found.ctypes.data, self.address, found.nbytes, int(self.stream.handle)))
        self.stream.sync()
        return found

    def free(self):
        done(driver.cuMemFree(self.address))


def given(seed, step, rank, count, dtype):
    return np.random.default_rng([seed, step, rank]).integers(0, 4, count).astype(dtype)


def call(comm, stream, choice, seed, step):
    """A call that a seed chooses; what it gave, and what it must give."""
    kind = choice.choice(["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "ring", "alltoall"])
    dtype, count = choice.choice(TYPES), choice.choice([1, 3, choice.randrange(2, 5000), choice.randrange(5000, 100000)])
    operation, root = choice.choice(list(OPERATIONS)), choice.randrange(SIZE)
    whole = kind in ("reduce_scatter", "alltoall")
    parts = np.stack([given(seed, step, rank, count * (SIZE if whole else 1), dtype) for rank in range(SIZE)])
    source = Array(stream, parts.shape[1], dtype, np.ascontiguousarray(parts[RANK]))
    room = Array(stream, count * (SIZE if kind in ("allgather", "alltoall") else 1), dtype)
    reduced = OPERATIONS[operation](parts).astype(dtype)
    expected = reduced
    if kind == "allreduce":
        comm.allreduce(source, room, operation, stream=stream)
    elif kind == "allgather":
        comm.allgather(source, room, stream=stream)
        expected = parts.reshape(-1)
    elif kind == "reduce_scatter":
        comm.reduce_scatter(source, room, operation, stream=stream)
        expected = reduced[RANK * count :][:count]
    elif kind == "broadcast":
        comm.broadcast(source, room, root, stream=stream)
        expected = parts[root]
    elif kind == "reduce":
        comm.reduce(source, room, operation, root=root, stream=stream)
        expected = reduced if RANK == root else None
    elif kind == "alltoall":
        comm.alltoall(source, room, stream=stream)
        expected = np.concatenate([part[RANK * count :][:count] for part in parts])
    else:
        with nccl.group():
            comm.send(source, (RANK + 1) % SIZE, stream=stream)
            comm.recv(room, (RANK - 1) % SIZE, stream=stream)
        expected = parts[RANK - 1]
    found = room.numbers()
    source.free()
    room.free()
    is_right = expected is None or np.array_equal(found.view(np.uint8), expected.view(np.uint8))
    return None if is_right else f"seed {seed} step {step} rank {RANK}: {kind} {np.dtype(dtype)} {count}"


def unique_id(path):
    if RANK == 0:
        with open(path + ".new", "wb") as file:
            file.write(bytes(nccl.get_unique_id()))
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as file:
        return nccl.UniqueId.from_bytes(file.read())


def main():
    device = Device(int(os.environ["LOCAL_RANK"]))
    device.set_current()
    comm = nccl.Communicator.init(SIZE, RANK, unique_id(sys.argv[1]))
    streams, soft = [device.create_stream() for _ in range(2)], ctypes.CDLL("libcuda.so.1")
    first, seeds, wrong, calls = int(sys.argv[2]), int(sys.argv[3]), [], 0
    for seed in range(first, first + seeds):
        soft.softgpuSeed(seed)
        choice = random.Random(seed)
        for step in range(20):
            wrong += filter(None, [call(comm, choice.choice(streams), choice, seed, step)])
            calls += 1
    comm.destroy()
    said = wrong[:20] + [f"rank {RANK}: {seeds} seeds, {calls} calls, {len(wrong)} wrong results"]
    # At once: the ranks share the output.
    os.write(1, "".join(line + "\n" for line in said).encode())
    sys.exit(1 if wrong else 0)


main()
