"""Starting programs with a limit of time: one, or the ranks of a job. Ends only what it has started."""

import os
import signal
import subprocess
import tempfile
import time


class Ended:
    """What became of a process: its status (None: it ran past its limit), its output, what it said of errors."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    def last_words(self, lines=12):
        return "\n".join((self.err.strip() or self.out.strip()).splitlines()[-lines:])


class Child:
    """A process in a group of its own, so that its children end with it."""

    def __init__(self, command, environment):
        self.files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1],
            start_new_session=True)

    def has_ended(self):
        return self.process.poll() is not None

    def wait_until(self, deadline):
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass

    def end(self):
        """What became of it; one that still runs is killed."""
        status = self.process.poll()
        if status is None:
            # Its group is its own and its number is still taken: it has not been waited for.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        return Ended(status, *texts)


def run(command, environment, limit):
    """Runs a program to its end, for at most so many seconds."""
    child = Child(command, environment)
    try:
        child.wait_until(time.monotonic() + limit)
    finally:
        ended = child.end()
    return ended


# How long the others may go on when one rank has failed.
GRACE = 10


def run_ranks(command, environments, limit):
    """Runs a command once for each environment, together; what became of each. When one fails, the others get a moment."""
    deadline = time.monotonic() + limit
    children = []
    try:
        for environment in environments:
            children.append(Child(command, environment))
        while not all(child.has_ended() for child in children) and time.monotonic() < deadline:
            if any(child.process.poll() for child in children):
                deadline = min(deadline, time.monotonic() + GRACE)
            running = [child for child in children if not child.has_ended()]
            if running:
                running[0].wait_until(min(deadline, time.monotonic() + 0.2))
    finally:
        ended = [child.end() for child in children]
    return ended
