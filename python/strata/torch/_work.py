"""What a call gives back, and the threads that complete Futures.

A queued call is told of its end on its stream's thread. Nothing of the program runs there: a Future's callbacks may make
calls and wait for them (PowerSGD's do), and these would come after what is queued on that stream. So a pool of threads
completes the Futures, one thread more whenever all of them are busy.
"""

import contextlib
import os
import queue
import threading
from datetime import timedelta

from torch._C._distributed_c10d import Work as BaseWork
from torch.futures import Future

from ._timer import LONGEST

# Locks of this package are such that a signal's handler may take one that its thread has: it may call whatever a program may.
_futures = threading.RLock()


class Pool:
    """Threads that run functions, as many as functions run at once. They do not keep the process from ending."""

    def __init__(self):
        self._functions = queue.SimpleQueue()
        # An entry for each thread that waits for a function nobody has put.
        self._idle = queue.SimpleQueue()
        # An entry for each function that has not ended.
        self._under_way = queue.SimpleQueue()

    def run(self, function) -> None:
        """Runs `function()` on one of the threads."""
        self._under_way.put(None)
        self._functions.put(function)
        try:
            self._idle.get_nowait()
        except queue.Empty:
            threading.Thread(target=self._work, name="strata-futures", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                self._functions.get()()
            finally:
                self._under_way.get_nowait()
            self._idle.put(None)

    def is_busy(self) -> bool:
        """Whether a function has not ended."""
        return not self._under_way.empty()


pool = Pool()


def _begin_anew():
    """A forked child has none of its parent's threads, and a lock that one of them held stays locked there."""
    global _futures, pool
    _futures = threading.RLock()
    pool = Pool()


os.register_at_fork(after_in_child=_begin_anew)


class Work(BaseWork):
    """A call that has been queued.

    PyTorch passes on only `wait` and `get_future` of a Work made in Python; its `is_completed` is always False.
    """

    def __init__(self, describe, result):
        """`describe()` is the call in words, for messages; `result` is the value of the Future."""
        super().__init__()
        self.describe = describe
        # Tensors that no operation of the library uses itself: of copies, and of messages that wait for their peer.
        self.indirect = ()
        self._then = None
        self._result = result
        self._running = threading.Lock()
        self._running.acquire()
        self._ended = False
        self._error = None
        self._end = None
        self._future = None

    def finish(self, error: "Exception | None" = None) -> None:
        """Ends the call. The pool completes the Future."""
        with _futures:
            self._error = error
            self._ended = True
            end, then = self._end, self._then
        self._running.release()
        if then is not None:
            then(error)
        if end is not None:
            pool.run(lambda: end.set_result(None))

    def then(self, function) -> None:
        """Calls `function(error)` when the call has ended; one function at most."""
        with _futures:
            self._then = function
            ended = self._ended
        if ended:
            function(self._error)

    def _value(self, _end):
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the call has ended, and raises its error. A timeout of 0 leaves the limit to the call's own."""
        if not self._ended:
            seconds = timeout.total_seconds()
            if not self._running.acquire(timeout=min(seconds, LONGEST) if seconds > 0 else -1):
                raise RuntimeError(f"strata: {self.describe()} has not ended within {seconds:g} s")
            self._running.release()
        future = self._future
        if future is not None and not future.done():
            # The pool is about to complete it; who has waited may ask it at once.
            with contextlib.suppress(Exception):
                future.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future:
        """The Future that the call's end completes."""
        with _futures:
            if self._future is not None:
                return self._future
            # An error that Python sets on a Future is a value to C++, but not one that a callback raises.
            end = self._end = Future()
            self._future = end.then(self._value)
            ended = self._ended
        if ended:
            end.set_result(None)
        return self._future

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return self._result


class Done(BaseWork):
    """A call that has ended."""

    def __init__(self, result):
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> Future:
        future = Future()
        future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self):
        return self._result
