"""How tensors are given to the C functions: contiguous memory, a type of NCCL's and a count."""

import torch
from torch._C._distributed_c10d import ReduceOp

from .. import _lib

_RED = ReduceOp.RedOpType

# Types that NCCL has.
TYPES = {
    torch.int8: _lib.INT8,
    torch.uint8: _lib.UINT8,
    torch.int16: _lib.INT16,
    torch.int32: _lib.INT32,
    torch.int64: _lib.INT64,
    torch.float16: _lib.FLOAT16,
    torch.float32: _lib.FLOAT32,
    torch.float64: _lib.FLOAT64,
    torch.bfloat16: _lib.BFLOAT16,
    torch.float8_e4m3fn: _lib.FLOAT8_E4M3,
    torch.float8_e5m2: _lib.FLOAT8_E5M2,
}
# Unsigned types that came to PyTorch later.
for _name, _type in (("uint16", _lib.UINT16), ("uint32", _lib.UINT32), ("uint64", _lib.UINT64)):
    if hasattr(torch, _name):
        TYPES[getattr(torch, _name)] = _type

# Complex numbers are pairs.
PAIRS = {torch.complex32: _lib.FLOAT16, torch.complex64: _lib.FLOAT32, torch.complex128: _lib.FLOAT64}

NUMERIC = {_RED.SUM: _lib.SUM, _RED.PRODUCT: _lib.PROD, _RED.MAX: _lib.MAX, _RED.MIN: _lib.MIN, _RED.AVG: _lib.AVG}
WHOLE = {**NUMERIC, _RED.BAND: _lib.BIT_AND, _RED.BOR: _lib.BIT_OR, _RED.BXOR: _lib.BIT_XOR}
# True is 1: or is the maximum, and is the minimum.
LOGIC = {
    _RED.SUM: _lib.MAX,
    _RED.MAX: _lib.MAX,
    _RED.BOR: _lib.MAX,
    _RED.PRODUCT: _lib.MIN,
    _RED.MIN: _lib.MIN,
    _RED.BAND: _lib.MIN,
    _RED.BXOR: _lib.BIT_XOR,
}
LINEAR = {_RED.SUM: _lib.SUM, _RED.AVG: _lib.AVG}
_PREMUL_SUM = _RED.PREMUL_SUM
_SUM = _RED.SUM


def moved(tensor) -> "tuple[int, int]":
    """The type and count with which a tensor is moved. A type that NCCL lacks goes as bytes."""
    dtype = tensor.dtype
    known = TYPES.get(dtype)
    if known is not None:
        return known, tensor.numel()
    pair = PAIRS.get(dtype)
    if pair is not None:
        return pair, 2 * tensor.numel()
    return _lib.UINT8, tensor.numel() * tensor.element_size()


def _factor(op):
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]


def _scalar(factor, dtype):
    """The factor of a PREMUL_SUM as a number of the elements' type, a tensor in host memory."""
    given = torch.as_tensor(factor)
    if not given.is_cpu or given.numel() != 1:
        raise TypeError(f"the factor of PREMUL_SUM must be one number in host memory, not {given.numel()} on {given.device}")
    given = given.reshape(())
    if given.is_complex() and given.imag.item() != 0:
        raise TypeError(f"the factor of PREMUL_SUM must be real, not {given.item()}")
    given = given.real if given.is_complex() else given
    scalar = given.to(dtype.to_real() if dtype in PAIRS else dtype)
    if not scalar.is_floating_point() and scalar.item() != given.item():
        raise TypeError(f"the factor of PREMUL_SUM of {dtype} must be a whole number that {dtype} has, not {given.item()}")
    return scalar


def reduced(op, tensor, comm):
    """The type, the count and the operation with which a tensor is reduced, and the operation to be ended afterwards
    or None. Raises TypeError where the type lacks the operation."""
    dtype = tensor.dtype
    kind = op.op
    known = TYPES.get(dtype)
    if known is not None:
        count, table = tensor.numel(), NUMERIC if dtype.is_floating_point else WHOLE
    elif dtype is torch.bool:
        known, count, table = _lib.UINT8, tensor.numel(), LOGIC
    elif dtype in PAIRS:
        known, count, table = PAIRS[dtype], 2 * tensor.numel(), LINEAR
    else:
        raise TypeError(f"{dtype} cannot be reduced, only moved")
    operation = table.get(kind)
    if operation is not None:
        return known, count, operation, None
    if kind == _PREMUL_SUM and dtype is not torch.bool:
        scalar = _scalar(_factor(op), dtype)
        operation = _lib.pre_multiplied_sum(scalar.data_ptr(), known, comm)
        return known, count, operation, operation
    raise TypeError(f"{dtype} has no {kind.name}")


class Copies:
    """Contiguous copies of tensors that are not, made before a call and copied back after it."""

    __slots__ = ("before", "after")

    def __init__(self):
        self.before = []
        self.after = []

    def tensors(self) -> list:
        """The tensors that are copied."""
        return [tensor for _plain, tensor in self.before] + [tensor for tensor, _plain in self.after]

    def _copy(self, tensor, before, after):
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        if before:
            self.before.append((plain, tensor))
        if after:
            self.after.append((tensor, plain))
        return plain

    def read(self, tensor):
        """Memory that holds what the tensor holds when the call begins."""
        return tensor if is_plain(tensor) else self._copy(tensor, True, False)

    def written(self, tensor):
        """Memory whose contents the tensor has when the call has ended."""
        return tensor if is_plain(tensor) else self._copy(tensor, False, True)

    def changed(self, tensor):
        """Memory that is read and written."""
        return tensor if is_plain(tensor) else self._copy(tensor, True, True)

    def joined(self, tensors, like, before, after):
        """One block of memory for several tensors as large as `like`."""
        block = torch.empty((len(tensors), *like.shape), dtype=like.dtype)
        for part, tensor in zip(block.unbind(0), tensors):
            if before:
                self.before.append((part, tensor))
            if after:
                self.after.append((tensor, part))
        return block


# In the place of messages of nothing, which NCCL leaves out: who expects something else from one is told so.
_NOTHING = torch.zeros(1, dtype=torch.uint8)


def message_of(tensor):
    """What is sent or received for a contiguous tensor: itself, or one byte for none."""
    return tensor if tensor.numel() else _NOTHING


def tensors_of(held) -> list:
    """The tensors among what is held, in lists and tuples of any depth."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, (list, tuple)):
        return [tensor for part in held for tensor in tensors_of(part)]
    return []


def memory_of(held) -> list:
    """The memory of the tensors among what is held. Who has it keeps it, also where a tensor gets other memory."""
    return [tensor.untyped_storage() for tensor in tensors_of(held)]


def addresses_of(tensor) -> range:
    """The addresses from the tensor's first byte to its last; where it is strided, with what lies between its elements."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin, element_bytes = tensor.data_ptr(), tensor.element_size()
    return range(begin, begin + (last + 1) * element_bytes)


def overlap(one: range, other: range) -> bool:
    """Whether two ranges of addresses have one in common."""
    return max(one.start, other.start) < min(one.stop, other.stop)


def is_plain(tensor) -> bool:
    """Whether the tensor's memory is its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def copy_all(pairs) -> None:
    """Copies each second tensor into the first one."""
    with torch.no_grad():
        for target, source in pairs:
            target.detach().copy_(source.detach())
