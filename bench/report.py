"""Joins the rows of bench/host.c, bench/gloo.py and bench/limits.c into tables and pictures. scripts/bench-host starts it.

usage: report.py DIR --processors N [--page PAGE]     reads DIR/host.csv, DIR/limits.csv, DIR/lines.csv and DIR/machine.txt

Writes DIR/cells.csv (of each cell the best peer and the machine's limit), DIR/cells.md (the same to read), a picture
for each mode and number of ranks, and DIR/summary.md; with --page the summary goes into PAGE instead, between the lines
`<!-- figures -->` and `<!-- end of figures -->`. A ratio is theirs / ours, of iterations that followed each other: above 1
Strata is faster. The peer of a cell is the best beside Strata, the one with the least ratio: times of runs that were not in turns
are not compared.

The limit of a cell is the largest of three times that no library can go below, from the rates of limits.csv:
  a cache line's one way, where ranks wait for one another in every call (calls of those with a root overlap)
  above 4 KB the bytes that cross between processors, by all of these at once, each as fast as one copies what another has
  just written
  all bytes that are copied, and all that are added, by as many processors as there are ranks, two at most
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

WARM = 4096  # Up to here calls follow one another, and overlap.
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "ping_pong"]
PEERS = {"openmpi": "Open MPI 4", "openmpi5": "Open MPI 5", "mpich": "MPICH", "gloo": "Gloo"}
MEMORIES = {"malloc": ("malloc", "#c2410c"), "nccl": ("ncclMemAlloc", "#1d4ed8")}
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Spread:
    """Quartiles."""

    q1: float
    median: float
    q3: float

    @staticmethod
    def of(row: dict[str, str], name: str, unit: str = "_us") -> Spread:
        return Spread(*(float(row[f"{name}_{which}{unit}"]) for which in ("q1", "median", "q3")))


@dataclass(frozen=True)
class Cell:
    """What one cell came to against one peer."""

    peer: str
    mode: str
    ranks: int
    busy: int
    collective: str
    memory: str
    size: int
    ours: Spread
    theirs: Spread
    ratio: Spread

    @property
    def part(self) -> tuple[str, int, int]:
        return self.mode, self.ranks, self.busy

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.part, COLLECTIVES.index(self.collective), self.memory, self.size)

    @staticmethod
    def of(row: dict[str, str]) -> Cell:
        spreads = Spread.of(row, "ours"), Spread.of(row, "theirs"), Spread.of(row, "ratio", "")
        who = row["peer"], row["mode"], int(row["ranks"]), int(row["busy"])
        return Cell(*who, row["collective"], row["memory"], int(row["bytes"]), *spreads)


@dataclass(frozen=True)
class Limits:
    """The machine's rates: microseconds by limit, threads and bytes."""

    times: dict[tuple[str, int], dict[int, float]]
    processors: int
    lines: dict[tuple[str, int, int], list[float]]

    @staticmethod
    def read(folder: Path, processors: int) -> Limits:
        times: dict[tuple[str, int], dict[int, float]] = {}
        lines: dict[tuple[str, int, int], list[float]] = {}
        with (folder / "lines.csv").open() as file:
            for row in csv.DictReader(file):
                if row["line_us"]:
                    lines.setdefault((row["mode"], int(row["ranks"]), int(row["busy"])), []).append(float(row["line_us"]))
        with (folder / "limits.csv").open() as file:
            for row in csv.DictReader(file):
                by_size = times.setdefault((row["limit"], int(row["threads"])), {})
                by_size[int(row["bytes"])] = float(row["median_us"])
        return Limits(times, processors, lines)

    def latency(self, part: tuple[str, int, int] | None = None) -> float:
        """A cache line's one way: its median while a part was measured, or at the beginning."""
        lines = self.lines.get(part) if part else None
        return statistics.median(lines) if lines else self.times.get(("latency", 2), {64: 0.0})[64]

    def time(self, limit: str, threads: int, size: float) -> float:
        """Of `size` bytes, between the measured sizes on a straight line in logarithms; the fewest threads that are known."""
        known = self.times.get((limit, threads)) or self.times.get((limit, 1), {})
        if size <= 0 or not known:
            return 0.0
        sizes = sorted(known)
        low = max([s for s in sizes if s <= size], default=sizes[0])
        high = min([s for s in sizes if s >= size], default=sizes[-1])
        if low == high:
            return known[low] * size / low
        share = math.log(size / low) / math.log(high / low)
        return math.exp(math.log(known[low]) * (1 - share) + math.log(known[high]) * share)

    def of(self, cell: Cell) -> float:
        """Microseconds."""
        n, size, name = cell.ranks, cell.size, cell.collective
        used = min(n, self.processors)
        apart = 1 - 1 / used
        handed = {"all_reduce": 2.0, "gather": 1 / used, "scatter": 1 / used}.get(name, 1.0) * apart * size
        copied = {
            "all_reduce": n - 1, "all_gather": n, "broadcast": n - 1, "all_to_all": n, "reduce": 0, "reduce_scatter": 0
        }.get(name, 1) * size  # fmt: skip
        added = (n - 1) * size if name in ("all_reduce", "reduce", "reduce_scatter") else 0
        threads = min(used, 2)
        work = (copied * self.time("copy", threads, size) + added * self.time("reduce", threads, size)) / size
        one_way = self.latency(cell.part) if name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ping_pong") else 0.0
        return max(one_way, self.time("handed", 2, handed) if size > WARM else 0.0, work)


def best_peers(cells: Iterable[Cell]) -> list[Cell]:
    """Of each cell the row of the peer that was best beside Strata, in the order of the tables."""
    best: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        if cell.key not in best or cell.ratio.median < best[cell.key].ratio.median:
            best[cell.key] = cell
    return [best[key] for key in sorted(best, key=repr_key)]


def repr_key(key: tuple[object, ...]) -> tuple[object, ...]:
    modes = ["processes", "threads", "tcp"]
    return (key[2], modes.index(str(key[0])), *key[1:])


def size_text(size: int) -> str:
    for unit, shift in (("M", 20), ("K", 10)):
        if size >> shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Spread) -> str:
    return f"{number(values.median)} ({number(values.q1)}..{number(values.q3)})"


def part_text(part: tuple[str, int, int]) -> str:
    mode, ranks, busy = part
    how = {"processes": "processes", "threads": "threads of one process", "tcp": "nodes of one rank each, over TCP"}[mode]
    return f"{ranks} ranks, {how}" + (f", beside {busy} processes that compute" if busy else "")


def part_file(part: tuple[str, int, int]) -> str:
    return f"{part[0]}-{part[1]}" + (f"-busy-{part[2]}" if part[2] else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def grid(cells: Sequence[Cell]) -> str:
    """Ratios: a row for each collective and kind of memory, a column for each size; those below 1 are bold."""
    # In blocks the smallest sizes grow to a float for each rank; the column is that of the size that was asked for.
    sizes = sorted({cell.size for cell in cells if cell.collective == "all_reduce"} or {cell.size for cell in cells})
    found = {(c.collective, c.memory, min(sizes, key=lambda s: abs(math.log(s / c.size)))): c for c in reversed(cells)}
    rows = []
    for name in COLLECTIVES:
        for memory in MEMORIES:
            of_row = [found.get((name, memory, size)) for size in sizes]
            texts = [("" if c is None else spread(c.ratio) if c.ratio.median >= 1 else f"**{spread(c.ratio)}**") for c in of_row]
            if any(texts):
                rows.append([name, memory, *texts])
    return table(["collective", "memory", *map(size_text, sizes)], rows)


def details(cells: Sequence[Cell], limits: Limits) -> str:
    head = ["collective", "memory", "bytes", "Strata (us)", "best peer", "its time (us)", "ratio", "limit (us)", "Strata / limit"]
    rows = []
    for c in cells:
        limit = limits.of(c)
        over = number(c.ours.median / limit) if limit else ""
        peer = PEERS.get(c.peer, c.peer)
        rows.append([c.collective, c.memory, size_text(c.size), spread(c.ours), peer, spread(c.theirs), spread(c.ratio), number(limit), over])
    return table(head, rows)


def tick_text(value: float) -> str:
    return f"{value:g}"


class Panel:
    """One collective's plot: ratio over bytes, both logarithmic."""

    WIDTH, HEIGHT, LEFT, TOP = 300, 210, 44, 28

    def __init__(self, name: str, cells: Sequence[Cell], at: tuple[int, int], span: tuple[float, float, int, int]) -> None:
        self.name, self.cells, self.at = name, cells, at
        self.low, self.high, self.smallest, self.largest = span

    def x(self, size: float) -> float:
        share = math.log(size / self.smallest) / max(math.log(self.largest / self.smallest), 1e-9)
        return self.at[0] + self.LEFT + share * (self.WIDTH - self.LEFT - 12)

    def y(self, ratio: float) -> float:
        ratio = min(max(ratio, self.low), self.high)
        share = math.log(ratio / self.low) / math.log(self.high / self.low)
        return self.at[1] + self.TOP + (1 - share) * (self.HEIGHT - self.TOP - 30)

    def axes(self) -> list[str]:
        left, right = self.x(self.smallest), self.x(self.largest)
        top, bottom = self.y(self.high), self.y(self.low)
        out = [f'<text x="{left}" y="{top - 9}" class="name">{self.name}</text>']
        out.append(f'<rect x="{left}" y="{top}" width="{right - left:.1f}" height="{bottom - top:.1f}" class="frame"/>')
        for tick in (t * 10.0**e for e in range(-3, 4) for t in (1, 2, 5)):
            if self.low <= tick <= self.high:
                y = self.y(tick)
                kind = "one" if tick == 1 else "grid"
                out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" class="{kind}"/>')
                out.append(f'<text x="{left - 5}" y="{y + 3.5:.1f}" class="tick" text-anchor="end">{tick_text(tick)}</text>')
        for size in (8, 128, 1 << 10, 64 << 10, 1 << 20, 32 << 20, 256 << 20):
            if self.smallest <= size <= self.largest:
                text = f'<text x="{self.x(size):.1f}" y="{bottom + 14:.1f}" class="tick" text-anchor="middle">{size_text(size)}</text>'
                out.append(text)
        return out

    def lines(self) -> list[str]:
        out = []
        for memory, (_, colour) in MEMORIES.items():
            cells = sorted((c for c in self.cells if c.memory == memory), key=lambda c: c.size)
            if not cells:
                continue
            upper = [f"{self.x(c.size):.1f},{self.y(c.ratio.q3):.1f}" for c in cells]
            lower = [f"{self.x(c.size):.1f},{self.y(c.ratio.q1):.1f}" for c in reversed(cells)]
            middle = [f"{self.x(c.size):.1f},{self.y(c.ratio.median):.1f}" for c in cells]
            out.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.18"/>')
            out.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            for c, point in zip(cells, middle, strict=True):
                x, y = point.split(",")
                title = f"{memory}, {size_text(c.size)}: {spread(c.ratio)} against {PEERS.get(c.peer, c.peer)}"
                out.append(f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colour}"><title>{title}</title></circle>')
        return out


STYLE = """<style>
text { font-family: sans-serif; fill: #1f2937 } .name { font-size: 13px; font-weight: bold } .tick { font-size: 10px; fill: #4b5563 }
.title { font-size: 15px; font-weight: bold } .frame { fill: none; stroke: #9ca3af } .grid { stroke: #e5e7eb }
.one { stroke: #111827; stroke-dasharray: 4 3 }
</style>"""


def picture(part: tuple[str, int, int], cells: Sequence[Cell]) -> str:
    """An SVG: a panel for each collective, a line for each kind of memory, its quartiles shaded."""
    names = [name for name in COLLECTIVES if any(c.collective == name for c in cells)]
    ratios = [value for c in cells for value in (c.ratio.q1, c.ratio.q3)]
    low = min(0.5, max(0.02, min(ratios) / 1.1))
    high = max(2.0, min(50.0, max(ratios) * 1.1))
    span = low, high, min(c.size for c in cells), max(c.size for c in cells)
    columns, head = 3, 52
    width, height = columns * Panel.WIDTH + 10, head + -(-len(names) // columns) * Panel.HEIGHT
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">', STYLE]
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out.append(f'<text x="12" y="20" class="title">Time of the best peer / time of Strata: {part_text(part)}</text>')
    for i, (label, colour) in enumerate(MEMORIES.values()):
        out.append(f'<line x1="{12 + 130 * i}" y1="36" x2="{36 + 130 * i}" y2="36" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{41 + 130 * i}" y="40" class="tick">{label}</text>')
    out.append('<text x="290" y="40" class="tick">above 1 Strata is faster; shaded: quartiles; across: bytes</text>')
    for i, name in enumerate(names):
        at = (i % columns) * Panel.WIDTH, head + i // columns * Panel.HEIGHT
        panel = Panel(name, [c for c in cells if c.collective == name], at, span)
        out += panel.axes() + panel.lines()
    return "\n".join([*out, "</svg>"]) + "\n"


def limits_text(limits: Limits) -> str:
    """The machine's own limits, in words and a table."""
    rows = []
    for size in sorted(limits.times.get(("copy", 1), {})):
        row = [size_text(size)]
        for limit, threads in (("handed", 2), ("copy", 1), ("copy", 2), ("reduce", 1), ("reduce", 2)):
            time = limits.times.get((limit, threads), {}).get(size)
            row.append(f"{size / time / 1e3:.1f}" if time else "")
        rows.append(row)
    head = ["bytes", "handed over", "copy, one thread", "copy, two", "reduce, one thread", "reduce, two"]
    one_way = f"A cache line's one way between two processors took {limits.latency() * 1e3:.0f} ns at the beginning. Rates in GB/s:\n\n"
    return one_way + table(head, [row for row in rows if any(row[1:])])


def summary(cells: Sequence[Cell], limits: Limits, machine: str) -> str:
    """What the page shows: the machine, its limits, and of each part a sentence, a grid and a picture."""
    out = [machine.strip() + "\n", limits_text(limits)]
    for part in dict.fromkeys(cell.part for cell in cells):
        here = [cell for cell in cells if cell.part == part]
        below = [cell for cell in here if cell.ratio.median < 1]
        out.append(f"### {part_text(part)}\n")
        out.append(f"{len(here) - len(below)} of {len(here)} cells at or above 1." + state(part, limits) + short_all_reduce(here, limits) + "\n")
        out.append(grid(here))
        out.append(f"![Ratios]({{folder}}{part_file(part)}.svg)\n")
    return "\n".join(out)


def state(part: tuple[str, int, int], limits: Limits) -> str:
    """The machine's state while a part was measured."""
    lines = [1e3 * line for line in limits.lines.get(part, [])]
    return f" A cache line's one way took {min(lines):.0f} to {max(lines):.0f} ns meanwhile." if lines else ""


def short_all_reduce(cells: Sequence[Cell], limits: Limits) -> str:
    """The 8-byte all-reduce in multiples of a cache line's one way."""
    times = [f"{number(c.ours.median / limits.latency(c.part))} ({c.memory})" for c in cells
             if c.collective == "all_reduce" and c.size == 8 and limits.latency(c.part)]  # fmt: skip
    return f" An 8-byte all-reduce takes {' and '.join(times)} times a cache line's median way." if times else ""


def losses(cells: Sequence[Cell]) -> str:
    """Every cell below 1, the worst first."""
    rows = [
        [part_file(c.part), c.collective, c.memory, size_text(c.size), spread(c.ratio), spread(c.ours), PEERS.get(c.peer, c.peer), spread(c.theirs)]
        for c in sorted(cells, key=lambda c: c.ratio.median)
        if c.ratio.median < 1
    ]
    return table(["part", "collective", "memory", "bytes", "ratio", "Strata (us)", "best peer", "its time (us)"], rows)


def write_cells(path: Path, cells: Sequence[Cell], limits: Limits) -> None:
    head = "mode,ranks,busy,collective,memory,bytes,peer,ours_q1_us,ours_median_us,ours_q3_us"
    head += ",theirs_q1_us,theirs_median_us,theirs_q3_us,ratio_q1,ratio_median,ratio_q3,limit_us"
    with path.open("w") as file:
        print(head, file=file)
        for c in cells:
            numbers = [f"{v:.3f}" for s in (c.ours, c.theirs, c.ratio) for v in (s.q1, s.median, s.q3)]
            print(*c.part, c.collective, c.memory, c.size, c.peer, *numbers, f"{limits.of(c):.3f}", sep=",", file=file)


def into_page(page: Path, text: str) -> None:
    old = page.read_text()
    before, rest = old.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--processors", type=int, required=True)
    options = parser.parse_args()
    with (options.folder / "host.csv").open() as file:
        cells = best_peers(Cell.of(row) for row in csv.DictReader(file))
    limits = Limits.read(options.folder, options.processors)
    machine = (options.folder / "machine.txt").read_text()
    write_cells(options.folder / "cells.csv", cells, limits)
    parts = {part: [c for c in cells if c.part == part] for part in dict.fromkeys(c.part for c in cells)}
    every = "\n".join(f"## {part_text(part)}\n\n{details(here, limits)}" for part, here in parts.items())
    below = f"## Cells below 1\n\n{losses(cells)}"
    (options.folder / "cells.md").write_text(f"# Every cell against its best peer\n\n{machine}\n{below}\n{every}")
    for part, here in parts.items():
        (options.folder / f"{part_file(part)}.svg").write_text(picture(part, here))
    text = summary(cells, limits, machine)
    if not options.page:
        (options.folder / "summary.md").write_text(text.replace("{folder}", ""))
    else:
        into_page(options.page, text.replace("{folder}", options.folder.name + "/"))
    print(text.replace("{folder}", f"{options.folder}/"))
    print(below)


if __name__ == "__main__":
    main()
