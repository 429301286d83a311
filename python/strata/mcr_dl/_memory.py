"""Tensors as the C functions take them: an address, a count and a type of NCCL's.

NumPy's arrays and PyTorch's tensors are asked directly; whatever else has DLPack's protocol (`__dlpack__`) is asked by that.
"""

import ctypes
import sys
import weakref
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object

from .. import _lib

# Types that NCCL and Strata have, by the name that NumPy, PyTorch and ml_dtypes give them.
TYPES = {
    "int8": _lib.INT8,
    "uint8": _lib.UINT8,
    "int16": _lib.INT16,
    "uint16": _lib.UINT16,
    "int32": _lib.INT32,
    "uint32": _lib.UINT32,
    "int64": _lib.INT64,
    "uint64": _lib.UINT64,
    "float16": _lib.FLOAT16,
    "float32": _lib.FLOAT32,
    "float64": _lib.FLOAT64,
    "bfloat16": _lib.BFLOAT16,
    "float8_e4m3fn": _lib.FLOAT8_E4M3,
    "float8_e5m2": _lib.FLOAT8_E5M2,
}
# Complex numbers are pairs.
PAIRS = {"complex32": _lib.FLOAT16, "complex64": _lib.FLOAT32, "complex128": _lib.FLOAT64}
_FLOATING = ("float", "bfloat")

_NUMBERS = {_lib.SUM, _lib.PROD, _lib.MAX, _lib.MIN, _lib.AVG}
_WHOLE = _NUMBERS | {_lib.BIT_AND, _lib.BIT_OR, _lib.BIT_XOR}
# True is 1: or is the maximum, and is the minimum.
_LOGIC = {
    _lib.SUM: _lib.MAX,
    _lib.MAX: _lib.MAX,
    _lib.BIT_OR: _lib.MAX,
    _lib.PROD: _lib.MIN,
    _lib.MIN: _lib.MIN,
    _lib.BIT_AND: _lib.MIN,
    _lib.BIT_XOR: _lib.BIT_XOR,
}

HOST = "cpu"


class ReduceOp:
    """How elements are reduced. PyTorch's and DeepSpeed's ReduceOp are taken as well."""

    SUM = _lib.SUM
    PRODUCT = _lib.PROD
    MAX = _lib.MAX
    MIN = _lib.MIN
    AVG = _lib.AVG
    BAND = _lib.BIT_AND
    BOR = _lib.BIT_OR
    BXOR = _lib.BIT_XOR


_OPERATIONS = {name: value for name, value in vars(ReduceOp).items() if not name.startswith("_")}
_NAMES = {value: name for name, value in _OPERATIONS.items()}


def operation_of(op) -> int:
    """The C interface's number of an operation."""
    if type(op) is int and op in _NAMES:
        return op
    name = getattr(op, "name", None) or getattr(getattr(op, "op", None), "name", None)
    if name not in _OPERATIONS:
        raise TypeError(f"mcr_dl: {op!r} is no operation; there are {', '.join(_OPERATIONS)} of mcr_dl.ReduceOp")
    return _OPERATIONS[name]


class Memory:
    """Contiguous memory of elements of one type."""

    __slots__ = ("address", "count", "kind", "bytes_each", "device", "owner", "fits")

    def __init__(self, address, count, kind, bytes_each, device, owner, fits=None):
        self.address = address
        self.count = count
        # The type's name.
        self.kind = kind
        self.bytes_each = bytes_each
        # "cpu", or such as "cuda:1".
        self.device = device
        # What keeps the memory while a call is under way.
        self.owner = owner
        # `fits(tensor)`: whether a tensor of this id is still this memory; None where that cannot be told at a glance.
        self.fits = fits

    def moved(self, count=None) -> "tuple[int, int]":
        """The type and count with which so many elements are moved, by default all. A type that NCCL lacks goes as bytes."""
        count = self.count if count is None else count
        code = TYPES.get(self.kind)
        if code is not None:
            return code, count
        pair = PAIRS.get(self.kind)
        return (pair, 2 * count) if pair is not None else (_lib.UINT8, count * self.bytes_each)

    def reduced(self, op, count=None) -> "tuple[int, int, int]":
        """The type, count and operation with which so many elements are reduced. TypeError where the type lacks it."""
        operation, kind = operation_of(op), self.kind
        count = self.count if count is None else count
        if kind in TYPES:
            if operation in (_NUMBERS if kind.startswith(_FLOATING) else _WHOLE):
                return TYPES[kind], count, operation
        elif kind == "bool":
            if operation in _LOGIC:
                return _lib.UINT8, count, _LOGIC[operation]
        elif kind in PAIRS:
            if operation in (_lib.SUM, _lib.AVG):
                return PAIRS[kind], 2 * count, operation
        else:
            raise TypeError(f"mcr_dl: {kind} cannot be reduced, only moved")
        raise TypeError(f"mcr_dl: {kind} has no {_NAMES[operation]}")


def memory_of(tensor, name: str, written: bool) -> Memory:
    """What a tensor is. `name` is the argument's, for messages; `written` says that a call writes to it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(torch, tensor, name)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _of_numpy(tensor, name, written)
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _of_dlpack(tensor, name, written)
    raise TypeError(f"mcr_dl: {name} must be a tensor (of PyTorch, of NumPy, or with __dlpack__), not {type(tensor).__name__}")


def _not_contiguous(name, shape):
    return ValueError(f"mcr_dl: {name}, of shape {tuple(shape)}, is not contiguous; pass a contiguous copy")


def _of_torch(torch, tensor, name) -> Memory:
    if tensor.layout is not torch.strided:
        raise TypeError(f"mcr_dl: {name} is {tensor.layout}; use to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"mcr_dl: {name} is a conjugated or negated view; use resolve_conj() and resolve_neg()")
    if not tensor.is_contiguous():
        raise _not_contiguous(name, tensor.shape)
    device, dtype, count, address = tensor.device, tensor.dtype, tensor.numel(), tensor.data_ptr()
    if device.type not in (HOST, "cuda"):
        raise TypeError(f"mcr_dl: {name} is on {device}; tensors on processors and on CUDA's (HIP's) GPUs are taken")
    kind = str(dtype).removeprefix("torch.")
    same = weakref.ref(tensor)

    def fits(again):
        return (
            same() is again
            and again.data_ptr() == address
            and again.numel() == count
            and again.dtype is dtype
            and again.is_contiguous()
        )

    # The storage stays although the tensor is given other memory (`.data =`) while a call is under way.
    owner = (tensor, tensor.untyped_storage())
    return Memory(address, count, kind, tensor.element_size(), str(device), owner, fits)


def _of_numpy(array, name, written) -> Memory:
    dtype, count = array.dtype, array.size
    if dtype.hasobject:
        raise TypeError(f"mcr_dl: {name} holds Python's objects ({dtype}), which cannot be moved")
    if not array.flags.c_contiguous:
        raise _not_contiguous(name, array.shape)
    if written and not array.flags.writeable:
        raise ValueError(f"mcr_dl: {name} cannot be written to; pass an array whose flags.writeable is set")
    kind = dtype.name if dtype.isnative else f"{dtype.name} of foreign byte order"
    address = array.ctypes.data
    # An array's first field is the address of its elements. It is read from there, since to ask for it takes a microsecond;
    # where it is not there every call asks.
    place = c_void_p.from_address(id(array) + object.__basicsize__)
    if place.value != address:
        return Memory(address, count, kind, dtype.itemsize, HOST, array)
    numpy_array = type(array)

    def fits(again):
        return (
            type(again) is numpy_array
            and again.dtype is dtype
            and again.size == count
            and (again.flags.carray if written else again.flags.c_contiguous)
            and place.value == address
        )

    return Memory(address, count, kind, dtype.itemsize, HOST, array, fits)


# DLPack's structures, of version 1.0 (dlpack.h).
class _Device(Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class _Type(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _Type),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    ]


_READ_ONLY = 1
_DEVICES = {1: HOST, 2: "cuda", 3: HOST, 10: "cuda", 11: HOST, 13: "cuda"}
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_FLOAT8 = {(10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes, _pointer_of.restype = [py_object, c_char_p], c_void_p
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [py_object, c_char_p]


def _capsule(tensor):
    try:
        return tensor.__dlpack__(max_version=(1, 0), copy=False)
    except TypeError:
        # Of before version 1.0.
        return tensor.__dlpack__()


def _of_dlpack(tensor, name, written) -> Memory:
    capsule = _capsule(tensor)
    if _is_valid(capsule, b"dltensor_versioned"):
        whole = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if whole.major != 1:
            raise TypeError(f"mcr_dl: {name} has DLPack {whole.major}.{whole.minor}, and this reads 1.x")
        found, read_only = whole.tensor, bool(whole.flags & _READ_ONLY)
    else:
        found, read_only = _Tensor.from_address(_pointer_of(capsule, b"dltensor")), False
    if written and read_only:
        raise ValueError(f"mcr_dl: {name} cannot be written to: DLPack says that it is read-only")
    if found.device.type not in _DEVICES:
        raise TypeError(f"mcr_dl: {name} is on a device of DLPack's type {found.device.type}, which is none of a CPU, CUDA's or HIP's")
    shape = [found.shape[axis] for axis in range(found.ndim)]
    count, expected = 1, 1
    for extent in shape:
        count *= extent
    for axis in reversed(range(found.ndim)):
        if count and found.strides and shape[axis] != 1 and found.strides[axis] != expected:
            raise _not_contiguous(name, shape)
        expected *= shape[axis]
    code, bits = found.dtype.code, found.dtype.bits
    kind = _FLOAT8.get((code, bits)) or ("bool" if code == 6 else f"{_CODES.get(code, f'type {code} of ')}{bits}")
    if found.dtype.lanes != 1:
        kind = f"{kind} in vectors of {found.dtype.lanes}"
    if bits * found.dtype.lanes % 8:
        raise TypeError(f"mcr_dl: {name} is of {kind}, whose elements are no whole bytes")
    place = _DEVICES[found.device.type]
    device = place if place == HOST else f"{place}:{found.device.id}"
    address = (found.data or 0) + found.byte_offset
    # The capsule holds the memory: whoever made it frees it when the capsule goes.
    return Memory(address, count, kind, bits * found.dtype.lanes // 8, device, (tensor, capsule))
