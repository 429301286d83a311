"""Runs every part of scripts/gpu-check and writes the report; what the options mean is said at its head."""

import argparse
import os
import shutil
import sys
import time

sys.dont_write_bytecode = True

import command
import machine
import pytorch
import report
from processes import run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NO_PYTORCH = "there is no PyTorch"

# The parts: name, title where it cannot begin, what it needs, seconds it may take, what does it.
PARTS = [
    ("info", "strata gpu info", False, 40, command.info),
    ("kernels", "strata gpu kernels", False, 120, command.kernels),
    ("bandwidth", "strata gpu bandwidth", False, 90, command.bandwidth),
    ("train", "Training under DDP and FSDP, 20 steps", True, 120, pytorch.train),
    ("capture", "Graph capture", True, 60, pytorch.capture),
    ("collectives", "Collectives of several ranks, each a node, over TCP", True, 240, pytorch.collectives),
    ("collectives", "Collectives of nodes of two ranks, over NCCL's own rail", True, 120, pytorch.rail),
]


class Check:
    """What the parts know and leave."""

    def __init__(self, options):
        self.strata = os.path.join(options.prefix, "bin", "strata")
        self.library = os.path.realpath(os.path.join(options.prefix, "lib", "libstrata.so"))
        self.python, self.quick, self.rehearse = options.python, options.quick, options.rehearse
        self.most = options.maxbytes or ("256M" if options.quick else "1G")
        # What a user's shell says of NCCL and Strata would be measured as well.
        theirs = ("NCCL_", "STRATA_", "LD_PRELOAD")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        self.gpu, self.torch, self.without_torch = None, None, ""
        self.goals = []

    def goal(self, what, measured, met):
        self.goals.append((what, measured, "met" if met else "NOT MET"))


def parse():
    parser = argparse.ArgumentParser(prog="gpu-check", description="Checks Strata on a GPU and writes a report.")
    parser.add_argument("--prefix", required=True, help="where scripts/install has put Strata")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs", "gpu"), help="the report's folder")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, 4 ranks only")
    parser.add_argument("--only", default="", help="some parts, separated by commas")
    parser.add_argument("--limit", type=float, default=470, help="seconds of the whole")
    parser.add_argument("--rehearse", action="store_true", help="PyTorch's parts on the processor, with gloo")
    parser.add_argument("--maxbytes", help="the largest operand of strata gpu bandwidth")
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    unknown = set(options.only) - {name for name, *_ in PARTS}
    if unknown:
        parser.error(f"there is no part {sorted(unknown)[0]}")
    for path in ("bin/strata", "lib/libstrata.so"):
        if not os.path.exists(os.path.join(options.prefix, path)):
            parser.error(f"{options.prefix} has no {path}; scripts/install --prefix {options.prefix} puts it there")
    return options


def why_not(check, needs_torch, left):
    """Why a part cannot begin."""
    if left < 5:
        return "no time left"
    if not needs_torch:
        return ""
    if not check.torch:
        return f"{NO_PYTORCH}: {check.without_torch}"
    if not check.rehearse and not check.torch["gpu"]:
        return "PyTorch sees no GPU"
    if not check.rehearse and not check.torch["nccl"]:
        return "PyTorch has no NCCL: " + check.torch.get("no nccl", "")
    return ""


def run_parts(check, options):
    deadline = time.monotonic() + options.limit
    parts = []
    for name, title, needs_torch, limit, act in PARTS:
        if options.only and name not in options.only:
            continue
        start = time.monotonic()
        why = why_not(check, needs_torch, deadline - start)
        if why:
            part = report.Part(title, report.SKIPPED, why)
        else:
            print(f"== {title}", flush=True)
            try:
                part = act(check, min(limit, deadline - start))
            except Exception as error:  # One failing part does not stop the others.
                part = report.Part(title, report.FAILED, f"{type(error).__name__}: {error}")
        part.seconds = time.monotonic() - start
        print(f"{part.outcome}: {title}" + (f": {part.why}" if part.why else ""), flush=True)
        parts.append(part)
    return parts


def machine_rows(check, smi):
    gpu = check.gpu or {}
    rows = [("GPU", gpu.get("name") or smi.get("name") or "none found")]
    if gpu:
        rows.append(("multiprocessors, memory", f"{gpu['multiprocessors']}, {report.size(gpu['memory_bytes'])}"))
    rows += [(f"nvidia-smi: {name}", value) for name, value in smi.items() if name != "name"]
    return rows + [
        ("processor", machine.processor()), ("memory", machine.memory()),
        ("system", f"{os.uname().sysname} {os.uname().release}"),
    ]


def version_rows(check):
    ended = run([check.strata, "--version"], check.environment, 10)
    rows = [("Strata", ended.out.strip().removeprefix("strata ") or "unknown")]
    commit = machine.commit(ROOT)
    rows.append(("commit of the scripts", commit or "not known"))
    if check.gpu:
        rows.append(("driver's interface", f"{check.gpu['kind']} {check.gpu['release']}"))
    for name, value in (check.torch or {}).items():
        if name == "nccl":
            rows.append(("NCCL of PyTorch", ".".join(map(str, value)) or "none"))
        elif name not in ("gpu", "gpus"):
            rows.append((name, value))
    return rows


NOTHING_RAN = 3


def main():
    options = parse()
    if shutil.which(options.python) is None:
        print(f"gpu-check: there is no interpreter {options.python}", file=sys.stderr)
        return 2
    check = Check(options)
    wants_torch = any(needs for name, _, needs, *_ in PARTS if not options.only or name in options.only)
    if wants_torch:
        check.torch, check.without_torch = machine.pytorch(check.python, check.environment)
    parts = run_parts(check, options)
    smi = machine.nvidia_smi()
    gpu = (check.gpu or {}).get("name") or smi.get("name") or "no GPU"
    notes = ["A rehearsal on the processor with gloo: says nothing of Strata or of a GPU."] if options.rehearse else []
    said = ["scripts/gpu-check", "--prefix", "DIR"]
    said += [word for word, given in (("--quick", options.quick), ("--rehearse", options.rehearse)) if given]
    said += ["--only", ",".join(options.only)] if options.only else []
    text = report.document(
        gpu, " ".join(said), machine_rows(check, smi), version_rows(check), check.goals, parts, notes)
    print("report:", report.write(options.out, report.file_name(gpu), text))
    for outcome in (report.PASSED, report.FAILED, report.SKIPPED):
        print(sum(part.outcome == outcome for part in parts), outcome.lower(), end=" ")
    print()
    if any(part.outcome == report.FAILED for part in parts):
        return 1
    return 0 if any(part.outcome == report.PASSED for part in parts) else NOTHING_RAN


sys.exit(main())
