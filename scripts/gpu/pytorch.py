"""The parts that PyTorch does: ranks on one GPU, with NCCL as it is and with Strata in front of it."""

import glob
import json
import math
import os
import sys
import tempfile

from processes import run_ranks
from report import FAILED, SKIPPED, Part, quoted, size, table

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
# The relative difference that losses may have where Strata adds in another order than NCCL.
ALLOWED = 1e-6
# The first release in which ranks of one host may share a GPU.
MULTI_RANK = [2, 30]
# From this size on the goal of being faster than plain NCCL counts.
GOAL_BYTES = 16 * MIB
# What a rank needs of the GPU beside its vectors: its context, NCCL's buffers, and what checking takes.
RANK_BYTES = 1536 * MIB
# How many microseconds a call may keep the host.
GOAL_HOST_US = 20

ALGORITHMS = ("STRATA_ALLGATHER_ALGO", "STRATA_REDUCESCATTER_ALGO", "STRATA_ALLREDUCE_ALGO")


class Way:
    """How NCCL's calls are served: by itself, or with Strata in front, with these settings. Where Strata is to carry
    collectives, `tells` stands in its line about each that it carries first."""

    def __init__(self, name, preload, settings=(), tells=""):
        self.name, self.preload, self.settings, self.tells = name, preload, dict(settings), tells


PLAIN = Way("plain NCCL", False)
PRELOAD = Way("Strata, nothing forced", True)
# With a node for each rank there is one level, between nodes.
TCP = Way("Strata over TCP", True, dict.fromkeys(ALGORITHMS, "log") | {"STRATA_INTER": "tcp"}, "because")
RAIL = Way("Strata over NCCL's rail", True, dict.fromkeys(ALGORITHMS, "two_level") | {"STRATA_INTER": "vendor"}, " runs as ")


class Job:
    """What the ranks of a job left: their results, or why there are none; what Strata logged on each."""

    def __init__(self, results, why, logs, mapped):
        self.results, self.why, self.logs, self.mapped = results, why, logs, mapped

    def lines(self, text, rank=0):
        """Strata's lines of a rank in which this stands, without process numbers."""
        return [line.split(" STRATA ", 1)[-1] for line in self.logs[rank].splitlines() if text in line]


def environment(check, way, rank, count, per_node, folder):
    names = {
        "RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % per_node,
        # Each node is a host for NCCL, which refuses two ranks of one host on a GPU.
        "NCCL_HOSTID": f"node{rank // per_node}",
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": 1,
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": os.path.join(folder, f"nccl.{rank}"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONDONTWRITEBYTECODE": 1,
    }
    if per_node > 1:
        names["NCCL_MULTI_RANK_GPU_ENABLE"] = 1
    if way.preload:
        names["LD_PRELOAD"] = check.library
        names.update(way.settings)
    return check.environment | {name: str(value) for name, value in names.items()}


def text_of(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def job(check, program, way, count, limit, what, per_node=1):
    """Runs a program on so many ranks."""
    with tempfile.TemporaryDirectory(prefix="gpu-check") as folder:
        command = [check.python, os.path.join(HERE, program), "--folder", folder, "--limit", str(max(limit - 5, 1))]
        command += ["--job", json.dumps(what)] + (["--cpu"] if check.rehearse else [])
        environments = [environment(check, way, rank, count, per_node, folder) for rank in range(count)]
        ended = run_ranks(command, environments, limit)
        results = [text_of(os.path.join(folder, f"result.{rank}")) for rank in range(count)]
        logs = [text_of(os.path.join(folder, f"nccl.{rank}.strata")) + ended[rank].err for rank in range(count)]
        vendor = [text_of(path) for path in sorted(glob.glob(os.path.join(folder, "nccl.*")))]
    bad = [rank for rank in range(count) if ended[rank].status != 0]
    why = ""
    if bad:
        # Others that were ended may only have waited for the one that failed.
        rank = next((rank for rank in bad if ended[rank].status is not None), bad[0])
        status = ended[rank].status
        said = f"did not end within {limit:.0f} s" if status is None else f"ended with status {status}"
        why = f"{way.name}, rank {rank} of {count} {said}: {ended[rank].last_words()}"
        warned = [line for text in vendor for line in text.splitlines() if "NCCL WARN" in line]
        why += "".join("\n" + line for line in warned[:3])
    found = [json.loads(result) for result in results if result]
    mapped = sorted({path for result in found for path in result["mapped"]})
    if not why:
        names = [os.path.basename(path) for path in mapped]
        if any("libstrata" in name for name in names) != way.preload or not any("libnccl" in name for name in names):
            why = f"{way.name}: another library served; mapped were {names}"
    return Job([] if why else found, why, logs, mapped)


def served(check, jobs):
    """Which libraries were mapped (/proc/self/maps), and what Strata said of what it carries."""
    rows = []
    for name, done in jobs:
        files = ", ".join(f"`{os.path.basename(path)}`" for path in done.mapped)
        rows.append((name, files or "none"))
    text = "\n" + table(("way", "libraries mapped (/proc/self/maps)"), rows)
    for name, done in jobs:
        said = [line for word in ("Strata ", "two levels", "because", " runs as ") for line in done.lines(word)]
        if said:
            text += f"\n{name}, rank 0:\n" + quoted("\n".join(dict.fromkeys(said[:16])))
    return text


def not_carried(check, way, done, names):
    """Collectives that Strata was to carry and did not."""
    if check.rehearse or not way.tells or not done.results:
        return []
    return [name for name in names if not any(line.split(" ", 1)[-1].startswith(name) for line in done.lines(way.tells))]


def merged(done):
    """The rows of all ranks: times of the slowest, right where all are right."""
    rows = {}
    for result in done.results:
        for row in result["rows"]:
            key = (row["bytes"], row["collective"])
            kept = rows.setdefault(key, dict(row))
            for name in ("median_us", "min_us", "max_us", "host_median_us", "host_max_us"):
                kept[name] = max(kept[name], row[name])
            kept["right"] = kept["right"] and row["right"]
    return rows


def compared(check, part, jobs, count):
    """A table of the ways side by side; returns (ratio to plain NCCL, what) of what the goal speaks of."""
    tables = {name: merged(done) for name, done in jobs if done.results}
    plain = tables.get(PLAIN.name, {})
    rows, ratios = [], []
    for key in sorted({key for found in tables.values() for key in found}):
        for name, found in tables.items():
            if key not in found:
                rows.append((key[1], size(key[0]), name, "SKIPPED: no time left", "", "", "", ""))
                continue
            row = found[key]
            ratio = plain[key]["median_us"] / row["median_us"] if key in plain else None
            if ratio and name != PLAIN.name and key[0] >= GOAL_BYTES and key[1] != "all_reduce":
                ratios.append((ratio, f"{key[1]} of {size(key[0])}, {count} ranks"))
            if not row["right"]:
                part.fail(f"{name}: {key[1]} of {size(key[0])} on {count} ranks gives a wrong result")
            rows.append((
                key[1], size(key[0]), name, f"{row['median_us']:.0f}", f"{row['min_us']:.0f} to {row['max_us']:.0f}",
                f"{ratio:.2f}" if ratio else "-", f"{row['host_median_us']:.1f}, {row['host_max_us']:.1f}",
                "right" if row["right"] else "WRONG"))
    part.text += f"\n### {count} ranks\n\n" + table(
        ("collective", "vector", "way", "median us", "from, to", "faster than plain NCCL",
         "host us: median, most", "result"), rows)
    return ratios


def calls_in_a_row(part, jobs):
    """How long calls take to return; the largest median of Strata's ways."""
    rows, worst = [], 0.0
    for name, done in jobs:
        for index, row in enumerate(done.results[0]["calls"] if done.results else []):
            median = max(result["calls"][index]["median_us"] for result in done.results)
            p99 = max(result["calls"][index]["p99_us"] for result in done.results)
            rows.append((row["collective"], name, f"{median:.1f}", f"{p99:.1f}"))
            if name != PLAIN.name:
                worst = max(worst, median)
    part.text += "\nCalls in a row of 1 MiB, microseconds until each returns to Python, PyTorch's own part included:\n\n"
    part.text += table(("collective", "way", "median", "99th percentile"), rows)
    return worst


def fitting(check, sizes, count):
    """The sizes for which the GPU has memory, with so many ranks on it: an input and an output each, one of them a block."""
    if check.rehearse or not check.gpu:
        return sizes
    return [size for size in sizes if count * (size + size // count + RANK_BYTES) <= check.gpu["free_bytes"]]


def side_by_side(check, title, ways, counts, names, limit, per_node=1):
    """Runs the collectives in each way, one after the other."""
    part = Part(title)
    sizes = [MIB, 16 * MIB, 64 * MIB] + ([] if check.quick else [256 * MIB, 1024 * MIB])
    if check.rehearse:
        sizes = [1 << 16, MIB]
    each = limit / (len(ways) * len(counts))
    what = {"collectives": names, "seconds": max(each - 25, 5), "seconds_each": 0.2 if check.quick else 1}
    ratios, worst, ran = [], 0.0, []
    for count in counts:
        what["sizes"] = fitting(check, sizes, count)
        if what["sizes"] != sizes:
            left_out = ", ".join(size(each) for each in sizes if each not in what["sizes"])
            part.text += f"\nThe GPU has no memory for {count} ranks with vectors of {left_out}.\n"
        jobs = [(way.name, job(check, "collectives.py", way, count, each, what, per_node)) for way in ways]
        for way, (_, done) in zip(ways, jobs):
            if done.why:
                part.fail(done.why.splitlines()[0])
                part.text += quoted(done.why)
            missing = not_carried(check, way, done, names)
            if missing:
                part.fail(f"{way.name}: NCCL carried {', '.join(missing)} on {count} ranks")
        ratios += compared(check, part, jobs, count)
        worst = max(worst, calls_in_a_row(part, jobs))
        ran = ran or jobs
    part.text += served(check, ran)
    return part, ratios, worst


def collectives(check, limit):
    counts = [4] if check.quick or check.rehearse else [4, 8]
    names = ["all_gather", "reduce_scatter", "all_reduce"]
    title = "Collectives of several ranks, each a node, over TCP"
    part, ratios, worst = side_by_side(check, title, [PLAIN, TCP], counts, names, limit)
    if ratios:
        least, what = min(ratios)
        goal = "All-gather and reduce-scatter of 16 MiB or more faster than plain NCCL over its sockets"
        check.goal(goal, f"{least:.2f} times as fast at least ({what})", least > 1)
    if worst:
        check.goal(f"A call returns within {GOAL_HOST_US} us (median, from Python)", f"{worst:.1f} us", worst <= GOAL_HOST_US)
    return part


def rail(check, limit):
    title = "Collectives of nodes of two ranks, over NCCL's own rail"
    version = check.torch["nccl"]
    if check.rehearse:
        return Part(title, SKIPPED, "a rehearsal has no NCCL")
    if version[:2] < MULTI_RANK:
        found = ".".join(map(str, version))
        why = f"NCCL {found} refuses two ranks of a node on one GPU; 2.30 and later take NCCL_MULTI_RANK_GPU_ENABLE"
        return Part(title, SKIPPED, why)
    counts = [4] if check.quick else [4, 8]
    return side_by_side(check, title, [PLAIN, RAIL], counts, ["all_gather", "reduce_scatter"], limit, per_node=2)[0]


def difference(one, other):
    """The largest relative difference of two runs' losses, over all ranks and steps; no number where one is none."""
    pairs = [pair for left, right in zip(one, other) for pair in zip(left, right)]
    far = [abs(a - b) / max(abs(a), sys.float_info.min) for a, b in pairs]
    return math.nan if any(map(math.isnan, far)) else max(far)


def train(check, limit):
    part = Part("Training under DDP and FSDP, 20 steps")
    count, what = 2 if check.rehearse else 4, {"steps": 20}
    ways = [PLAIN, PRELOAD, TCP]
    jobs = [(way.name, job(check, "train.py", way, count, limit / len(ways), what)) for way in ways]
    losses = {}
    for name, done in jobs:
        if done.why:
            part.fail(done.why.splitlines()[0])
            part.text += quoted(done.why)
        for kind in ("DDP", "FSDP"):
            losses[name, kind] = [result[kind] for result in done.results]
    rows = []
    for kind in ("DDP", "FSDP"):
        plain = losses[PLAIN.name, kind]
        for way in ways:
            found = losses[way.name, kind]
            if not found:
                continue
            said = "-"
            if plain and way is not PLAIN:
                far = difference(plain, found)
                said = "equal, bit by bit" if found == plain else f"{far:.1e} (allowed: {ALLOWED:.0e})"
                if not far <= ALLOWED:
                    part.fail(f"{kind}, {way.name}: losses differ by {far:.1e} of their value")
            rows.append((kind, way.name, repr(found[0][0]), repr(found[0][-1]), said))
    head = ("", "way", "first loss of rank 0", "last loss of rank 0", "largest relative difference to plain NCCL")
    part.text += f"{count} ranks on the GPU, each a node; float32, deterministic algorithms, fixed seeds. Losses of all ranks "
    part.text += "and steps are compared.\n\n" + table(head, rows) + served(check, jobs)
    return part


NOTICE = "captured into a graph are the vendor's"


def capture(check, limit):
    part = Part("Graph capture")
    if check.rehearse:
        return Part(part.title, SKIPPED, "a rehearsal has no graphs")
    replays = 10
    jobs = [(way.name, job(check, "capture.py", way, 2, limit / 2, {"replays": replays})) for way in (PLAIN, TCP)]
    rows = []
    for name, done in jobs:
        if done.why:
            part.fail(done.why.splitlines()[0])
            part.text += quoted(done.why)
            continue
        right = min(sum(result["right"]) for result in done.results)
        notices = [len(done.lines(NOTICE, rank)) for rank in range(len(done.results))]
        rows.append((name, f"{right} of {replays}", "yes" if all(r["after"] for r in done.results) else "no", notices))
        if right < replays or not all(result["after"] for result in done.results):
            part.fail(f"{name}: wrong results")
        if name != PLAIN.name and notices != [1] + [0] * (len(notices) - 1):
            part.fail(f"{name}: {notices} notices on the ranks that captured calls are NCCL's, instead of one on rank 0")
    head = ("way", "replays with right results", "right outside of the graph", "notices on each rank")
    part.text += table(head, rows) + served(check, jobs)
    return part
