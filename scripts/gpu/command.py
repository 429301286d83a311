"""The parts that `strata gpu` does: the driver, the kernels, their bandwidth."""

import json

from processes import run
from report import FAILED, SKIPPED, Part, size, table

# What `strata gpu` ends with where there is no driver.
NO_DRIVER = 3


def asked(check, arguments, limit):
    """The answer as JSON, or the part that says why there is none."""
    title = "strata gpu " + arguments[0]
    ended = run([check.strata, "gpu", *arguments, "--json"], check.environment, limit)
    try:
        answer = json.loads(ended.out)
    except ValueError:
        if ended.status is None:
            return None, Part(title, FAILED, f"it did not end within {limit:.0f} s")
        outcome = SKIPPED if ended.status == NO_DRIVER else FAILED
        return None, Part(title, outcome, ended.last_words(1) or f"status {ended.status}")
    part = Part(title)
    if ended.status != 0:
        part.fail(ended.last_words(1) if ended.err.strip() else f"status {ended.status}")
    return answer, part


def info(check, limit):
    answer, part = asked(check, ["info"], limit)
    check.gpu = answer
    if answer:
        part.text = table(("", ""), sorted(answer.items()))
        if not answer["host_registration"]:
            part.fail("host memory cannot be registered: " + answer["host_registration_why"])
    return part


def kernels(check, limit):
    answer, part = asked(check, ["kernels"], limit)
    if not answer:
        return part
    rows, failures, checks = [], [], 0
    for module in answer["modules"]:
        said = []
        for kernel in module["kernels"]:
            failed = len(kernel["failures"])
            said.append(f"{kernel['kernel']} {kernel['checks'] - failed}/{kernel['checks']}")
            failures += kernel["failures"]
            checks += kernel["checks"]
        rows.append((module["module"], f"{module['load_ms']:.1f}", ", ".join(said)))
    part.text = table(("module", "first load, ms", "launches with the host's bits, of all"), rows)
    part.text += "".join(f"\n- {failure}" for failure in failures[:20])
    if failures:
        part.fail(f"{len(failures)} of {checks} launches differ from the host")
    else:
        check.goal("Kernels have the host's bits", f"{checks} launches", True)
    return part


def bandwidth(check, limit):
    answer, part = asked(check, ["bandwidth", "--maxbytes", check.most], limit)
    if not answer:
        return part
    rows = []
    for row in answer["rows"]:
        head = (row["operation"], row["type"], size(row["bytes"]))
        if "skipped" in row:
            rows.append(head + ("SKIPPED: " + row["skipped"], "", "", ""))
        else:
            spread = f"{row['min_us']:.1f} to {row['max_us']:.1f}"
            share = f"{100 * row['share']:.0f} %" if row["share"] else "-"
            rows.append(head + (f"{row['median_us']:.1f}", spread, f"{row['gbs']:.1f}", share))
    part.text = "GB/s count bytes read and written, or over the link to the host. The share is that of the driver's own copy "
    part.text += "of an operand of the same size (`cuMemcpyDtoDAsync`, or to or from pinned memory).\n\n"
    part.text += table(("operation", "type", "operand", "median us", "from, to", "GB/s", "share"), rows)
    largest = max((row["bytes"] for row in answer["rows"] if "share" in row), default=0)
    judged = ("sum of", "shuffle")
    shares = [
        (row["share"], f"{row['operation']} {row['type']}")
        for row in answer["rows"]
        if row.get("share") and row["bytes"] == largest and row["operation"].startswith(judged)
    ]
    if shares:
        least, what = min(shares)
        goal = f"Reduce and shuffle of {size(largest)} at 85 % of the device's copy or more"
        check.goal(goal, f"{100 * least:.0f} % at least ({what.removesuffix(' -')})", least >= 0.85)
    return part
