"""Calls of the C functions, and what each backend's are queued on.

A call that is made again with the same tensors is one look-up and one call of C: its arguments are made once, as objects of
ctypes. Functions are taken from the library without types of arguments, so that these objects go to C as they are.
"""

import collections
import ctypes
import numbers
import functools
import time
from ctypes import Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from .. import _lib

_lib_calls = _lib.lib
NULL = c_void_p()
IN_PROGRESS = 7

_NEEDED = ("strataGetWorldId", "strataAllGatherVConfig", "ncclAllReduceConfig", "strataEventCreate")
_missing = [name for name in _NEEDED if not hasattr(_lib_calls, name)]
if _missing:
    raise _lib.LibraryError(
        f"strata: {_lib_calls._name} is not this version's libstrata.so: it lacks {', '.join(_missing)}; "
        "install the package and the library from one release"
    )


@functools.cache
def function(name: str):
    """A function of the library that takes objects of ctypes."""
    return _lib_calls[name]


class _CollConfig(Structure):
    """ncclCollConfig_t of nccl.h."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("ext", c_void_p),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("nvlsCTAs", c_int),
        ("cgaClusterSize", c_int),
        ("algSelection", c_char_p),
        ("forceAlgSelection", c_int),
        ("CTAPolicy", c_int),
        ("userProfilerTag", c_uint64),
        ("launchCompletionEvent", c_void_p),
    ]


_UNSET, _MAGIC = -(2**31), 0xCAFEBEEF


def config_of(name: str) -> "_CollConfig":
    """The options of a call that goes by this algorithm or carrier, and no other."""
    version = c_int()
    _lib_calls.ncclGetVersion(byref(version))
    size, unset = ctypes.sizeof(_CollConfig), (_UNSET,) * 4
    return _CollConfig(size, _MAGIC, version.value, None, *unset, name.encode(), 1, _UNSET, 0, None)


class McrError(RuntimeError):
    """A call could not be done. The text is the library's, and names the call, the backend and the rank."""


class McrTimeout(McrError, TimeoutError):
    """A limit of a wait has passed; the call goes on."""


def seconds_of(timeout, what) -> float:
    """A limit in seconds, at least 0; ValueError or TypeError for what is none."""
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(f"mcr_dl: {what}: a timeout is a number of seconds, not {timeout!r}")
    if not seconds >= 0:
        raise ValueError(f"mcr_dl: {what}: a timeout is at least 0 seconds, not {timeout!r}")
    return float(seconds)


class Work:
    """A call that has been queued."""

    __slots__ = ("_lane", "_event", "_held", "_what", "_error", "_done")

    def __init__(self, lane, event, what, held):
        self._lane = lane
        self._event = event
        self._what = what
        # Tensors, whose memory the call uses until it has ended.
        self._held = held
        self._error = None
        self._done = False

    def wait(self, backend: "str | None" = None, timeout: "float | None" = None) -> bool:
        """Waits until the call has ended, and raises its error. With a limit, in seconds, McrTimeout if that passes.

        `backend` is as the paper writes it, `h.wait('nccl')`; a handle knows its own.
        """
        if not self._done:
            self._end(self._lane.await_event(self._event, timeout, self._what))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        if not self._done:
            code = self._lane.query(self._event)
            if code == IN_PROGRESS:
                return False
            self._end(code)
        return True

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> "Exception | None":
        """The call's error, once it has ended with one."""
        return self._error

    def _end(self, code) -> None:
        if code:
            self._error = self._lane.failure(self._what, code)
        self._lane.release(self._event)
        self._event = self._held = None
        self._done = True


class Lane:
    """A backend's calls in host memory: a communicator, and the stream on which calls are queued."""

    # Events that are kept for further calls.
    _KEPT = 64

    def __init__(self, name, comm, rank, size):
        self.name = name
        self.comm = c_void_p(comm)
        self.rank = rank
        self.size = size
        self._stream = None
        self._events = []
        # Calls that nobody has waited for yet: the program may drop their handles.
        self._pending = collections.deque()

    def failure(self, what, code) -> McrError:
        """The exception for a call that has failed. Called on the thread of the call."""
        return McrError(f"mcr_dl: {what} on rank {self.rank} of {self.size}, backend {self.name!r}: {_lib.reason(code)}")

    def sync_arguments(self, arguments, config):
        """All arguments of a call that has ended when the function returns."""
        return (*arguments, self.comm, NULL, *config)

    def call(self, what, name, arguments, config, _held) -> None:
        """Makes a call, and returns when it has ended."""
        code = function(name)(*self.sync_arguments(arguments, config))
        if code:
            raise self.failure(what, code)

    def queue(self, what, name, arguments, config, held) -> Work:
        """Queues a call behind those of this backend that were queued before."""
        if self._stream is None:
            self._stream = c_void_p(_lib.Stream().handle)
        while self._pending and self._pending[0].is_completed():
            self._pending.popleft()
        code = function(name)(*arguments, self.comm, self._stream, *config)
        if code:
            raise self.failure(what, code)
        event = self._events.pop() if self._events else _new_event()
        code = _lib_calls.strataEventRecord(event, self._stream)
        if code:
            raise self.failure(what, code)
        work = Work(self, event, what, held)
        self._pending.append(work)
        return work

    def await_event(self, event, timeout, what) -> int:
        """Waits until what is before an event has ended; its result code."""
        if timeout is None:
            return _lib_calls.strataEventSynchronize(event)
        return poll_until(timeout, lambda: _lib_calls.strataEventQuery(event), what)

    def query(self, event) -> int:
        """The result code of what is before an event; IN_PROGRESS while it has not ended."""
        return _lib_calls.strataEventQuery(event)

    def release(self, event) -> None:
        """An event is free for another call."""
        if len(self._events) < self._KEPT:
            self._events.append(event)
        else:
            _lib_calls.strataEventDestroy(event)

    def synchronize(self) -> None:
        """Waits for all that is queued, and raises the first error that no handle's wait has raised."""
        first = None
        while self._pending:
            work = self._pending.popleft()
            told = work._done
            try:
                work.wait()
            except McrError as error:
                first = first or (None if told else error)
        if first is not None:
            raise first

    def is_busy(self) -> bool:
        """Whether a call has not ended."""
        return not all(work.is_completed() for work in self._pending)

    def close(self, abort: bool) -> "str | None":
        """Ends the communicator, with what is queued on it if `abort`; what has gone wrong, or None."""
        if abort:
            _lib_calls.ncclCommAbort(self.comm)
        code = 0
        if self._stream is not None:
            _lib_calls.strataStreamSynchronize(self._stream)
            _lib_calls.strataStreamDestroy(self._stream)
        self._stream = None
        for event in self._events:
            _lib_calls.strataEventDestroy(event)
        self._events.clear()
        self._pending.clear()
        if not abort:
            code = _lib_calls.ncclCommFinalize(self.comm) or _lib_calls.ncclCommDestroy(self.comm)
        return _lib.reason(code) if code else None


def _new_event() -> c_void_p:
    event = c_void_p()
    code = _lib_calls.strataEventCreate(byref(event))
    if code:
        raise McrError(f"mcr_dl: making an event: {_lib.reason(code)}")
    return event


def poll_until(timeout, query, what) -> int:
    """The result code of `query()` once it is not IN_PROGRESS; McrTimeout after `timeout` seconds."""
    seconds = seconds_of(timeout, what)
    end, pause = time.monotonic() + seconds, 20e-6
    while (code := query()) == IN_PROGRESS:
        if time.monotonic() >= end:
            raise McrTimeout(f"mcr_dl: {what} has not ended within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return code
