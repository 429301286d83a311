"""One rank of a program that has NumPy and no PyTorch: what mcr_dl needs is the library alone."""

import sys

import mcr_dl
import numpy as np


def main():
    mcr_dl.init(["nccl", "mpi"], timeout=30)
    rank, size = mcr_dl.get_rank("mpi"), mcr_dl.get_size("mpi")
    tensor = np.arange(1000.0) + rank
    work = mcr_dl.all_reduce("mpi", tensor, async_op=True)
    result = np.zeros(size, np.int32)
    mcr_dl.all_gather("nccl", result, np.full(1, rank, np.int32))
    work.wait("mpi")
    assert np.array_equal(tensor, size * np.arange(1000.0) + size * (size - 1) // 2)
    assert result.tolist() == list(range(size))
    mcr_dl.finalize()
    assert "torch" not in sys.modules
    print(f"rank {rank} of {size} without PyTorch", flush=True)


if __name__ == "__main__":
    main()
