"""The trace of a program: its steps and what it has to do, as JSON for `strata plan compile`."""

import json

# Collectives as msccl-tools names them, and as Strata does.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "custom": "custom",
}


def collective_named(name):
    """Strata's name of a collective, or None."""
    return _COLLECTIVES.get(str(name).replace("_", "").lower())


def step(op, src, dst, count, options):
    """One step. Options that are None are left out."""
    made = {"op": op, "src": list(src), "dst": list(dst), "count": count}
    made.update((key, value) for key, value in options.items() if value is not None)
    return made


def text(head, steps):
    """The trace's text, one line a step."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "{%s\n" % "\n ".join(lines) + ' "steps": [\n  %s\n]}\n' % ",\n  ".join(json.dumps(one) for one in steps)
