"""Time limits of calls, watched over by one thread for all of them."""

import heapq
import itertools
import os
import queue
import threading
import time

# What Python's own waits can take at most.
LONGEST = threading.TIMEOUT_MAX


class Alarm:
    """A function that is to be called at a time, unless `cancel` comes first."""

    __slots__ = ("function",)

    def __init__(self, function):
        self.function = function

    def cancel(self) -> None:
        """Nothing is called from now on. What is being called is not waited for."""
        self.function = None


class Timer:
    """A thread that calls functions at their times. It begins with the first one and does not keep the process from ending."""

    def __init__(self):
        # Signal handlers may set alarms too, in the middle of this thread's own: this queue can be used so.
        self._new = queue.SimpleQueue()
        self._thread = None

    def after(self, seconds: float, function) -> Alarm:
        """Has `function()` called after so many seconds."""
        alarm = Alarm(function)
        self._new.put((time.monotonic() + min(seconds, LONGEST), alarm))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="strata-timer", daemon=True)
            self._thread.start()
        return alarm

    def _work(self) -> None:
        alarms, order = [], itertools.count()
        while True:
            wait = None
            if alarms:
                wait = min(LONGEST, max(0.0, alarms[0][0] - time.monotonic()))
            try:
                end, alarm = self._new.get(timeout=wait)
                heapq.heappush(alarms, (end, next(order), alarm))
            except queue.Empty:
                function = heapq.heappop(alarms)[2].function
                if function is not None:
                    function()
            # Those that were cancelled hold nothing, and are thrown away before they become many.
            while alarms and alarms[0][2].function is None:
                heapq.heappop(alarms)
            if len(alarms) > 1000 and sum(entry[2].function is None for entry in alarms) > len(alarms) // 2:
                alarms = [entry for entry in alarms if entry[2].function is not None]
                heapq.heapify(alarms)


timer = Timer()


def after(seconds: float, function) -> Alarm:
    """Has `function()` called after so many seconds, by this process's timer."""
    return timer.after(seconds, function)


def _begin_anew():
    """A forked child has none of its parent's threads."""
    global timer
    timer = Timer()


os.register_at_fork(after_in_child=_begin_anew)
