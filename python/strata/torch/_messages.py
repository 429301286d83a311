"""Messages between two ranks: `send` and `recv` with tags.

Each tag from one rank to another is a channel of its own: a communicator of these two ranks and a stream. So a message
waits for nothing but the messages before it on its channel: not for a collective, another tag, another rank or the other
direction. The first message makes the channel, on the channel's stream, when its peer has come to it as well.
"""

import collections
import threading
import time

from .. import _lib
from . import _elements
from ._timer import after

_lib_calls = _lib.lib


class Channel:
    """The messages of one tag from one rank to another."""

    def __init__(self, group, source: int, target: int, tag: int):
        self._group = group
        self._sends = group.rank() == source
        self._name = f"message/{source}/{target}/{tag}"
        self._peer = target if self._sends else source
        self._stream = _lib.Stream()
        self._lock = threading.RLock()
        self._waiting = collections.deque()
        self._launched = set()
        self._comm = None
        # What the communicator itself allows; a shorter time, set later, is watched over here.
        self._limit_ms = group.timeout_ms()
        self._late = None
        self._error = None
        self._closed = False

    def start(self) -> None:
        """Begins to look for the peer."""
        self._stream.call(self._connect)

    def post(self, tensor, work) -> None:
        """Queues a message; `tensor` is contiguous."""
        with self._lock:
            if self._error is not None:
                work.finish(self._group.failure(work.describe(), self._error))
            elif self._comm is None:
                self._waiting.append((tensor, work))
            else:
                self._launch(tensor, work)

    def _connect(self, _error) -> None:
        try:
            offer = _lib.unique_id().hex()
            # Whoever comes first leaves an id; the other one takes it, and says so.
            store = self._group.other_store()
            agreed = store.compare_set(self._name, "", offer).decode()
            if agreed == offer:
                self._await_peer(store)
            else:
                store.set(f"{self._name}/here", "here")
            comm = _lib.init_host(2, bytes.fromhex(agreed), 0 if self._sends else 1, self._limit_ms)
        except Exception as error:
            self._fail(error)
            return
        with self._lock:
            self._comm = comm
            waiting, self._waiting = self._waiting, collections.deque()
            for tensor, work in waiting:
                self._launch(tensor, work)
            closed = self._closed
        if closed:
            _lib_calls.ncclCommAbort(comm)

    def _await_peer(self, store) -> None:
        """Waits until the peer has come to its side of the message. Who has died before that the group's communicator tells."""
        begin, pause = time.monotonic(), 0.0002
        while not store.check([f"{self._name}/here"]):
            lost, limit = self._group.lost(), self._group.timeout_ms() / 1000
            if lost is not None or self._closed:
                raise RuntimeError(lost or "the group has been destroyed")
            if limit and time.monotonic() - begin > limit:
                other = "receive" if self._sends else "send"
                raise RuntimeError(f"rank {self._peer} has not come to its {other} within {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _fail(self, error) -> None:
        with self._lock:
            self._error = error
            waiting, self._waiting = self._waiting, collections.deque()
        for _tensor, work in waiting:
            work.finish(self._group.failure(work.describe(), error))

    def _launch(self, tensor, work) -> None:
        self._launched.add(work)
        tensor = _elements.message_of(tensor)
        datatype, count = _elements.moved(tensor)
        function, peer = (_lib_calls.ncclSend, 1) if self._sends else (_lib_calls.ncclRecv, 0)
        code = function(tensor.data_ptr(), count, datatype, peer, self._comm, self._stream.handle)
        if code:
            self._launched.discard(work)
            work.finish(self._group.failure(work.describe(), _lib.reason(code)))
            return

        timer = self._watch()

        def ended(error, _held=_elements.memory_of(tensor)):
            if timer is not None:
                timer.cancel()
            self._launched.discard(work)
            work.finish(None if error is None else self._group.failure(work.describe(), self._late or error))

        self._stream.call(ended)

    def _watch(self):
        """A timer that ends the channel where the group's time limit has become another one than the channel's."""
        limit_ms = self._group.timeout_ms()
        if limit_ms in (0, self._limit_ms):
            return None

        def expire():
            self._late = f"the message has not been exchanged within {limit_ms / 1000:g} s"
            _lib_calls.ncclCommRevoke(self._comm, 0)

        return after(limit_ms / 1000, expire)

    def close(self, abort: bool) -> None:
        """Ends the channel. What waits for its peer fails, and so does a receive that nobody has waited for; what has been
        sent arrives."""
        with self._lock:
            self._closed = True
            comm = self._comm
        if comm is None:
            self._fail(RuntimeError("the group has been destroyed"))
        elif abort or self._launched and not self._sends:
            _lib_calls.ncclCommAbort(comm)
        else:
            _lib_calls.ncclCommFinalize(comm)
            _lib_calls.ncclCommDestroy(comm)
        self._stream.close()


class _Waiting(tuple):
    """One side of a message to oneself. It is equal to itself alone: tensors cannot be compared so."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Loopback:
    """The messages of one tag from a rank to itself: each receive takes the oldest message."""

    def __init__(self, group):
        self._group = group
        self._lock = threading.RLock()
        self._sent = collections.deque()
        self._wanted = collections.deque()

    def start(self) -> None:
        """There is nobody to look for."""

    def send(self, tensor, work) -> None:
        self._meet(self._sent, tensor, work)

    def recv(self, tensor, work) -> None:
        self._meet(self._wanted, tensor, work)

    def _expire(self, side, item, limit_ms) -> None:
        with self._lock:
            if item not in side:
                return
            side.remove(item)
        _tensor, work, _alarm = item
        work.finish(self._group.failure(work.describe(), f"its other side has not come within {limit_ms / 1000:g} s"))

    def _meet(self, side, tensor, work) -> None:
        limit_ms = self._group.timeout_ms()
        with self._lock:
            alarm = after(limit_ms / 1000, lambda: self._expire(side, item, limit_ms)) if limit_ms else None
            item = _Waiting((tensor, work, alarm))
            side.append(item)
            if not (self._sent and self._wanted):
                return
            source, sent, send_alarm = self._sent.popleft()
            target, received, recv_alarm = self._wanted.popleft()
        for alarm in (send_alarm, recv_alarm):
            if alarm is not None:
                alarm.cancel()
        error = None
        if source.dtype != target.dtype or source.numel() != target.numel():
            error = ValueError(
                f"strata: {received.describe()} wants {target.numel()} {target.dtype}, "
                f"and {sent.describe()} has {source.numel()} {source.dtype}"
            )
        else:
            _elements.copy_all([(target.view(-1), source.view(-1))])
        sent.finish(error)
        received.finish(error)

    def close(self, abort: bool) -> None:
        with self._lock:
            waiting = [work for _tensor, work, _alarm in (*self._sent, *self._wanted)]
            self._sent.clear()
            self._wanted.clear()
        for work in waiting:
            work.finish(RuntimeError(f"strata: {work.describe()}: the group has been destroyed"))


class Messages:
    """All channels of a group."""

    def __init__(self, group):
        self._group = group
        self._lock = threading.RLock()
        self._channels: dict = {}

    def _channel(self, source: int, target: int, tag: int):
        key = (source, target, tag)
        with self._lock:
            channel = self._channels.get(key)
            if channel is None:
                made = Loopback(self._group) if source == target else Channel(self._group, source, target, tag)
                # A signal's handler may have made one meanwhile.
                channel = self._channels.setdefault(key, made)
                if channel is made:
                    channel.start()
                else:
                    made.close(abort=True)
            return channel

    def send(self, tensor, target: int, tag: int, work) -> None:
        """Queues a message to a rank."""
        me = self._group.rank()
        channel = self._channel(me, target, tag)
        (channel.send if target == me else channel.post)(tensor, work)

    def recv(self, tensor, source: int, tag: int, work) -> None:
        """Queues the receipt of a message from a rank."""
        me = self._group.rank()
        channel = self._channel(source, me, tag)
        (channel.recv if source == me else channel.post)(tensor, work)

    def close(self, abort: bool) -> None:
        """Ends all channels."""
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close(abort)
