"""Tensors for the tests of mcr_dl: of NumPy, of PyTorch, or with DLPack's protocol alone, between guards that no call may touch."""

import numpy as np
import torch

GUARD = 3
NUMPY = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
TORCH = ["int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
REDUCED = [*(("numpy", name) for name in NUMPY), *(("torch", name) for name in TORCH), ("dlpack", "float32"), ("dlpack", "int16")]
MOVED = [*REDUCED, ("numpy", "bool"), ("numpy", "complex128"), ("torch", "bool"), ("torch", "complex64"), ("dlpack", "uint8")]


class Plain:
    """An array of which a library knows DLPack's protocol and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Made:
    """A tensor, and all bytes of the memory that it lies in."""

    def __init__(self, kind, values):
        library, name = self.kind = kind
        padded = [1] * GUARD + list(values) + [1] * GUARD
        if library == "torch":
            self._base = torch.tensor(padded).to(getattr(torch, name))
        else:
            self._base = np.array(padded).astype(name)
        inside = self._base[GUARD : GUARD + len(values)]
        self.tensor = Plain(inside) if library == "dlpack" else inside

    def fill(self, values) -> None:
        """Gives the tensor these values, where it lies."""
        self._base[GUARD : GUARD + len(values)] = Made(self.kind, values)._base[GUARD:-GUARD]

    def raw(self) -> bytes:
        base = self._base.view(torch.uint8).numpy() if self.kind[0] == "torch" else self._base
        return base.tobytes()

    def expect(self, values, what) -> None:
        """Fails unless the tensor holds these values in every byte, and the guards are untouched."""
        expected = Made(self.kind, values)
        assert self.raw() == expected.raw(), f"{what} of {self.kind}: {self._base} and not {expected._base}"


def value(rank, at):
    """Element `at` of what a rank has: small, so that every type holds sums and products of five ranks."""
    return (7 * rank + 3 * at + at // 5) % 3


def values(rank, count, first=0):
    return [value(rank, first + at) for at in range(count)]
