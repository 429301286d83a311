"""What the report says of the machine and of the versions of everything."""

import json
import os
import re
import shutil

from processes import run

PROBE = """
import json, platform
found = {"Python": platform.python_version()}
import torch
found["PyTorch"] = torch.__version__
found["CUDA of PyTorch"] = str(torch.version.cuda)
found["gpu"] = torch.cuda.is_available()
found["gpus"] = torch.cuda.device_count()
try:
    version = torch.cuda.nccl.version()
    found["nccl"] = list(version) if isinstance(version, tuple) else [version]
except Exception as error:
    found["nccl"] = []
    found["no nccl"] = str(error)
print(json.dumps(found))
"""


def first(pattern, path):
    try:
        with open(path) as file:
            found = re.search(pattern, file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def processor():
    name = first(r"^model name\s*:\s*(.*)$", "/proc/cpuinfo") or os.uname().machine
    return f"{name}, {len(os.sched_getaffinity(0))} usable cores"


def memory():
    kib = first(r"^MemTotal:\s*(\d+)", "/proc/meminfo")
    return f"{int(kib) / (1 << 20):.0f} GiB" if kib else "unknown"


def nvidia_smi():
    """What NVIDIA's own tool says of the first GPU, where it is there."""
    if not shutil.which("nvidia-smi"):
        return {}
    fields = ["name", "driver_version", "memory.total", "clocks.max.memory", "clocks.max.sm", "power.limit", "mig.mode.current"]
    ended = run(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader", "--id=0"], os.environ, 30)
    values = [value.strip() for value in ended.out.strip().split(",")]
    if ended.status != 0 or len(values) != len(fields):
        return {}
    return dict(zip(fields, values))


def pytorch(python, environment):
    """What the interpreter's PyTorch is, or why there is none."""
    ended = run([python, "-c", PROBE], environment, 120)
    if ended.status != 0:
        why = ended.last_words(1) if ended.status is not None else "asking for it took two minutes"
        return None, why or f"{python} ended with status {ended.status}"
    return json.loads(ended.out.strip().splitlines()[-1]), ""


def commit(root):
    """The commit of the tree that this script is in, where git can tell."""
    if not shutil.which("git") or not os.path.exists(os.path.join(root, ".git")):
        return None
    ended = run(["git", "-C", root, "describe", "--always", "--dirty", "--exclude=*"], os.environ, 10)
    return ended.out.strip() if ended.status == 0 else None
