"""A backend's calls on a GPU's memory, in the order of PyTorch's streams.

A call is queued on the current stream, and one with `async_op` on a stream of the backend's, behind what is queued on the current one.
A handle's `wait` has the current stream wait, not the program, as with PyTorch's own backend.
"""

import collections
from ctypes import byref, c_int, c_void_p

import torch

from .. import _lib
from ._calls import IN_PROGRESS, McrError, function, poll_until

_lib_calls = _lib.lib
_calls_of_init = _lib.lib["ncclCommInitRank"]


class DeviceWork:
    """A call that has been queued on a stream of a GPU."""

    __slots__ = ("_lane", "_event", "_what", "_held")

    def __init__(self, lane, event, what, held):
        self._lane = lane
        self._event = event
        self._what = what
        self._held = held

    def wait(self, backend: "str | None" = None, timeout: "float | None" = None) -> bool:
        """Has the current stream wait for the call. With a limit, in seconds, the program waits, and McrTimeout says that it passed."""
        if timeout is not None:
            poll_until(timeout, lambda: 0 if self._event.query() else IN_PROGRESS, self._what)
        self._lane.check_failure(self._what)
        torch.cuda.current_stream(self._lane.index).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        if self._event.query():
            self._held = None
            return True
        return False

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> "Exception | None":
        """What has failed on the call's communicator."""
        why = _lib.failure_of(self._lane.comm)
        return None if why is None else self._lane.error(self._what, why)


class DeviceLane:
    """A communicator on this process's GPU, and a stream for calls that are queued."""

    def __init__(self, name, unique, rank, size):
        self.name = name
        self.rank = rank
        self.size = size
        self.index = torch.cuda.current_device()
        # It begins to use the device, where nothing has yet.
        torch.cuda.current_stream(self.index)
        comm = c_void_p()
        given = _lib.UniqueId.from_buffer_copy(unique)
        code = _calls_of_init(byref(comm), c_int(size), given, c_int(rank))
        if code:
            raise RuntimeError(_lib.reason(code))
        self.comm = comm
        self._stream = None
        self._pending = collections.deque()

    def error(self, what, reason) -> McrError:
        """The exception for a call that has failed."""
        return McrError(f"mcr_dl: {what} on rank {self.rank} of {self.size}, backend {self.name!r} on cuda:{self.index}: {reason}")

    def check_failure(self, what) -> None:
        """Raises what has failed on the communicator."""
        why = _lib.failure_of(self.comm)
        if why is not None:
            raise self.error(what, why)

    def check(self, device, what) -> None:
        """Raises ValueError for a tensor on another GPU."""
        if device != f"cuda:{self.index}":
            raise ValueError(f"mcr_dl: {what}: a tensor is on {device}, and the backend's communicator on cuda:{self.index}")

    def _launch(self, what, name, arguments, config, stream) -> None:
        with torch.cuda.device(self.index):
            code = function(name)(*arguments, self.comm, c_void_p(stream.cuda_stream), *config)
        if code:
            raise self.error(what, _lib.reason(code))

    def call(self, what, name, arguments, config, _memories) -> None:
        """Queues a call on the current stream."""
        self._launch(what, name, arguments, config, torch.cuda.current_stream(self.index))

    def queue(self, what, name, arguments, config, held) -> DeviceWork:
        """Queues a call on the backend's own stream, behind what is on the current one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.index)
        while self._pending and self._pending[0].is_completed():
            self._pending.popleft()
        self._stream.wait_stream(torch.cuda.current_stream(self.index))
        self._launch(what, name, arguments, config, self._stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        work = DeviceWork(self, event, what, held)
        # It holds the tensors until the call has ended, so their memory goes to nothing else before.
        self._pending.append(work)
        return work

    def synchronize(self) -> None:
        """Waits for all calls that are queued, here and on the current stream; raises what has failed."""
        if self._stream is not None:
            self._stream.synchronize()
        torch.cuda.current_stream(self.index).synchronize()
        self._pending.clear()
        self.check_failure("synchronize")

    def is_busy(self) -> bool:
        """Whether a call that is queued on the backend's stream has not ended."""
        return not all(work.is_completed() for work in self._pending)

    def close(self, abort: bool) -> "str | None":
        """Ends the communicator; what has gone wrong, or None."""
        self._pending.clear()
        self._stream = None
        if abort:
            _lib_calls.ncclCommAbort(self.comm)
            return None
        code = _lib_calls.ncclCommFinalize(self.comm) or _lib_calls.ncclCommDestroy(self.comm)
        return _lib.reason(code) if code else None
