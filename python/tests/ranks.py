"""Starts the ranks of a test, with a watchdog, and runs one function in each.

Importing PyTorch takes seconds, so one process imports it, and every rank is a fork of it that begins at the function and
ends as any Python program does. As a program this file is that process.
"""

import atexit
import faulthandler
import functools
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path

_HERE = Path(__file__).resolve().parent


class Outcome:
    """How a rank ended: exit code (None: the watchdog ended it), output, and seconds."""

    def __init__(self, code, text, seconds):
        self.code = code
        self.text = text
        self.seconds = seconds


def free_port() -> int:
    """A port that nobody listens on, and that the system, where its range is the usual one, gives to no connection before it is used."""
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = random.randrange(10000, max(first_of_system, 20000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port below those of the system was found")


@functools.cache
def metadata() -> str:
    """A folder that says of the package in this tree what an installed one says of itself: its entry points."""
    project = tomllib.loads((_HERE.parent / "pyproject.toml").read_text())["project"]
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


def environment() -> dict:
    """What a program needs to find the package of this tree."""
    path = os.pathsep.join([str(_HERE.parent), str(_HERE), metadata()])
    library = os.environ.get("STRATA_LIBRARY", str(_HERE.parents[1] / "target" / "release" / "libstrata.so"))
    own = {"PYTHONPATH": path, "STRATA_LIBRARY": library, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # DeepSpeed looks for the environment's ninja.
    own["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return dict(os.environ, **own)


@functools.cache
def _forker():
    command = [sys.executable, str(_HERE / "ranks.py")]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return process


# How many times as long as usual ranks may take: for tests behind others, which have the time that those leave.
PATIENCE = float(os.environ.get("STRATA_TEST_PATIENCE", "1"))


def run(module, function, ranks=2, limit=60.0, env=None, arguments=()):
    """Runs `function(*arguments)` of a module on so many ranks. The outcome of each."""
    job = {"module": module, "function": function, "ranks": ranks, "limit": limit * PATIENCE, "env": env or {}}
    forker = _forker()
    print(json.dumps(dict(job, arguments=[str(argument) for argument in arguments])), file=forker.stdin, flush=True)
    return [Outcome(*fields) for fields in json.loads(forker.stdout.readline())]


def passes(test, module, function, **options):
    """Fails the test unless every rank ends well; shows what the ranks wrote then."""
    outcomes = run(module, function, **options)
    bad = [rank for rank, outcome in enumerate(outcomes) if outcome.code != 0]
    if bad:
        texts = "\n".join(f"--- rank {r}, exit code {o.code}\n{o.text}" for r, o in enumerate(outcomes))
        test.fail(f"{module}.{function}: ranks {bad} failed\n{texts}")
    return outcomes


def _serve():
    """Runs jobs, one a line, until the input ends. Returns in a rank what it is to do, and None at the end."""
    import torch.distributed  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job["ranks"])}
        begin = time.monotonic()
        children = {}
        files = [tempfile.TemporaryFile("w+") for _ in range(job["ranks"])]
        for rank, file in enumerate(files):
            pid = os.fork()
            if pid == 0:
                os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank), **job["env"])
                _redirect(file)
                return job
            children[pid] = rank
        outcomes = [None] * job["ranks"]
        for rank, (code, seconds) in _watch(children, begin, begin + job["limit"]).items():
            files[rank].seek(0)
            outcomes[rank] = [code, files[rank].read(), seconds]
            files[rank].close()
        print(json.dumps(outcomes), flush=True)
    return None


def _redirect(file):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _watch(children, begin, deadline):
    """Waits for all children; at the deadline, has those that are left print their stacks, and ends them."""
    ended, late = {}, False
    while children:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = None if late else os.waitstatus_to_exitcode(status)
                ended[children.pop(pid)] = (code, time.monotonic() - begin)
        if not late and time.monotonic() > deadline:
            late = True
            for pid in children:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            for pid in children:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return ended


def _run(job):
    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        # It does not find backends by itself.
        import strata.torch  # noqa: F401
    getattr(importlib.import_module(job["module"]), job["function"])(*job["arguments"])


if __name__ == "__main__":
    task = _serve()
    if task is not None:
        try:
            _run(task)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
