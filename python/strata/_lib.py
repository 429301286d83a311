"""The C functions of libstrata.so, through ctypes.

The library is opened by its path and without exporting its symbols (RTLD_LOCAL). It has NCCL's name and symbols, and a
process may also hold NVIDIA's, which PyTorch's wheel brings.

ctypes releases Python's global lock during each call, so other threads run while a call waits.
"""

import ctypes
import os
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

# Result codes of nccl.h.
SUCCESS, _IN_PROGRESS = 0, 7

# Element types of nccl.h and strata.h.
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = range(12)

INT16, UINT16 = 0x5354000C, 0x5354000D

# Operations of nccl.h and strata.h.
SUM, PROD, MAX, MIN, AVG = range(5)
BIT_AND, BIT_OR, BIT_XOR = 0x53540105, 0x53540106, 0x53540107

_SCALAR_HOST = 1
_NO_COLOR = -1
_VARIABLE = "STRATA_LIBRARY"


class LibraryError(ImportError):
    """libstrata.so cannot be opened, or is not the one that this package is for."""


class UniqueId(ctypes.Structure):
    """What the ranks of a new communicator share: ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_char * 128)]


CALLBACK = CFUNCTYPE(None, c_void_p, c_int)

_BUFFERS = [c_void_p, c_void_p, c_size_t, c_int]
_PROTOTYPES = {
    "strataGetUniqueId": [POINTER(UniqueId)],
    "strataCommInitHost": [POINTER(c_void_p), c_int, UniqueId, c_int, c_int],
    "ncclCommSplit": [c_void_p, c_int, c_int, POINTER(c_void_p), c_void_p],
    "ncclCommFinalize": [c_void_p],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
    "ncclCommRevoke": [c_void_p, c_int],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclRedOpCreatePreMulSum": [POINTER(c_int), c_void_p, c_int, c_int, c_void_p],
    "ncclRedOpDestroy": [c_int, c_void_p],
    "ncclReduce": [*_BUFFERS, c_int, c_int, c_void_p, c_void_p],
    "ncclBroadcast": [*_BUFFERS, c_int, c_void_p, c_void_p],
    "ncclAllReduce": [*_BUFFERS, c_int, c_void_p, c_void_p],
    "ncclReduceScatter": [*_BUFFERS, c_int, c_void_p, c_void_p],
    "ncclAllGather": [*_BUFFERS, c_void_p, c_void_p],
    "ncclAlltoAll": [*_BUFFERS, c_void_p, c_void_p],
    "ncclGather": [*_BUFFERS, c_int, c_void_p, c_void_p],
    "ncclScatter": [*_BUFFERS, c_int, c_void_p, c_void_p],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "strataStreamCreate": [POINTER(c_void_p)],
    "strataStreamDestroy": [c_void_p],
    "strataStreamSynchronize": [c_void_p],
    "strataStreamAddCallbackStatus": [c_void_p, CALLBACK, c_void_p],
    "strataStreamWaitRange": [c_void_p, c_void_p, c_size_t],
    "strataRangeQuery": [c_void_p, c_size_t, POINTER(c_size_t)],
}


def _path() -> str:
    """The library's path: what STRATA_LIBRARY names, else the one beside this package."""
    given = os.environ.get(_VARIABLE)
    if given and given != "auto":
        return given
    return str(Path(__file__).parent / "lib" / "libstrata.so")


def _open() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(f"strata: cannot open {path}: {error}; {_VARIABLE} names the path of libstrata.so") from None
    missing = [name for name in (*_PROTOTYPES, "strataGetLastError") if not hasattr(library, name)]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise LibraryError(
            f"strata: {path} is not this version's libstrata.so: it lacks {shown}; "
            "install the package and the library from one release"
        )
    for name, arguments in _PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int
    library.ncclGetErrorString.argtypes = [c_int]
    library.ncclGetErrorString.restype = c_char_p
    library.strataGetLastError.argtypes = []
    library.strataGetLastError.restype = c_char_p
    return library


lib = _open()


def reason(code: int) -> str:
    """What this thread's last failed call says; without a text, the meaning of the code."""
    return (lib.strataGetLastError() or lib.ncclGetErrorString(code)).decode(errors="replace")


def unique_id() -> bytes:
    """A new id for a communicator."""
    made = UniqueId()
    code = lib.strataGetUniqueId(byref(made))
    if code:
        raise RuntimeError(f"strata: making a unique id: {reason(code)}")
    return bytes(made)


def init_host(nranks: int, unique: bytes, rank: int, timeout_ms: int) -> int:
    """A communicator on the host. All ranks call, and each waits for the others.

    `timeout_ms` limits this and each operation; 0 sets no limit.
    """
    comm = c_void_p()
    code = lib.strataCommInitHost(byref(comm), nranks, UniqueId.from_buffer_copy(unique), rank, timeout_ms)
    if code:
        raise RuntimeError(reason(code))
    return comm.value


def split(comm: int, color: "int | None", key: int) -> "int | None":
    """A communicator of the ranks that give the same color; None without a color. All ranks of `comm` call."""
    made = c_void_p()
    code = lib.ncclCommSplit(comm, _NO_COLOR if color is None else color, key, byref(made), None)
    if code:
        raise RuntimeError(reason(code))
    return made.value


def failure_of(comm: int) -> "str | None":
    """What has failed on a communicator, a rank that has died among others; None if nothing has."""
    state = c_int()
    code = lib.ncclCommGetAsyncError(comm, byref(state)) or state.value
    return None if code in (SUCCESS, _IN_PROGRESS) else reason(code)


def pre_multiplied_sum(scalar: int, datatype: int, comm: int) -> int:
    """An operation that multiplies each input by the scalar at this address before it sums."""
    operation = c_int()
    code = lib.ncclRedOpCreatePreMulSum(byref(operation), scalar, datatype, _SCALAR_HOST, comm)
    if code:
        raise RuntimeError(reason(code))
    return operation.value


def wait_range(memory: range) -> "str | None":
    """Waits until these addresses are final in all operations under way that use them; what has failed, or None."""
    code = lib.strataStreamWaitRange(None, memory.start, len(memory))
    return reason(code) if code else None


def final_bytes(memory: range) -> "tuple[int, str | None]":
    """How many of these addresses from the first on are final, and what has failed, or None."""
    known = c_size_t()
    code = lib.strataRangeQuery(memory.start, len(memory), byref(known))
    return known.value, reason(code) if code else None


class Stream:
    """A host stream: runs what is queued on it in order, on a thread of its own."""

    def __init__(self):
        handle = c_void_p()
        code = lib.strataStreamCreate(byref(handle))
        if code:
            raise RuntimeError(f"strata: making a stream: {reason(code)}")
        self.handle = handle.value

    def close(self) -> None:
        """Takes nothing more; what is queued still runs."""
        lib.strataStreamDestroy(self.handle)

    def call(self, function) -> None:
        """Queues `function(error)`: `error` tells what failed since the last call of this method, or is None."""
        key = id(function)
        _queued[key] = function
        code = lib.strataStreamAddCallbackStatus(self.handle, _run_queued, key)
        if code:
            del _queued[key]
            raise RuntimeError(reason(code))


# Functions that are queued or run.
_queued: dict = {}


@CALLBACK
def _run_queued(key, code):
    try:
        # The text of the error is there during this call only.
        _queued[key](None if code == SUCCESS else reason(code))
    finally:
        del _queued[key]


def is_busy() -> bool:
    """Whether a function is queued on a stream or runs."""
    return bool(_queued)
