"""Prices of programs by `strata simulate`, each the best of the ways in which it can be cut into segments."""

import hashlib
import json
import subprocess
from itertools import groupby
from pathlib import Path

import generate



def whole(_size):
    """Programs that gain nothing by segments: each of their thread blocks is busy from beginning to end."""
    return [""]


def cut(size):
    """Whole, and in segments of which several are in flight, as the interpreter's tiles are (section 6.2)."""
    if size < 64 << 10:
        return [""]
    if size <= 1 << 20:
        return ["", "/segment=32K/window=8", "/segment=128K/window=8"]
    if size <= 8 << 20:
        return ["", "/segment=256K/window=8", "/segment=1M/window=8"]
    if size <= 64 << 20:
        return ["", "/segment=1M/window=8", "/segment=4M/window=8"]
    return ["", "/segment=16M/window=8"]


def size_text(nbytes):
    for unit, text in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >= 1 << unit and nbytes % (1 << unit) == 0:
            return f"{nbytes >> unit}{text}"
    return str(nbytes)


def powers(first, last):
    """All powers of two from one size to another."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * 2)
    return sizes


class Prices:
    """Makes programs in a folder and asks for their prices."""

    def __init__(self, strata, folder, without):
        self.strata, self.folder, self.without, self.made = strata, Path(folder), without, set()
        self.machines = Path(__file__).resolve().parent.parent.parent / "machines"

    def without_terms(self, *terms):
        """The same with further terms of the machine left out."""
        return Prices(self.strata, self.folder, [*self.without, *terms])

    def program(self, algorithm, **options):
        """The file of a program, made where it is not there."""
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        name = "-".join([algorithm] + [f"{key}{value}" for key, value in options.items()])
        path = self.folder / f"{name}.xml"
        if path not in self.made:
            self.made.add(path)
            generate.generate(generate.options([algorithm, *words]), path, self.strata)
        return path

    def times(self, machine, collective, nranks, sizes, programs, cuts=whole):
        """For each program the milliseconds at each size, by the best of the cuts."""
        found = [[] for _ in programs]
        for ways, band in groupby(sizes, cuts):
            methods = [f"script:{program}{way}" for program in programs for way in ways]
            cells = self._cells(machine, collective, nranks, list(band), methods)
            for place, row in enumerate(found):
                of_program = slice(place * len(ways), (place + 1) * len(ways))
                row += [min(method["ms"] for method in cell["methods"][of_program]) for cell in cells]
        return found

    def _cells(self, machine, collective, nranks, sizes, methods):
        without = [word for term in self.without for word in ("--without", term)]
        command = [
            str(self.strata), "simulate", *without, "--machine", str(machine), "--collective", collective, "-n", str(nranks),
            "--bytes", ",".join(map(str, sizes)), "--method", ",".join(methods), "--json", "-",
        ]
        known = self.folder / f"answer-{self._digest(command)}.json"
        if not known.exists():
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"simulate-msccl: {' '.join(command[:8])} ...: {run.stderr.strip()}")
            known.write_text(run.stdout)
        cells = json.loads(known.read_text())["cells"]
        assert len(cells) == len(sizes) and all(len(cell["methods"]) == len(methods) for cell in cells)
        return cells

    def _digest(self, command):
        """Of everything on which an answer rests: the command, its binary (which has the machines in it), and its files."""
        digest = hashlib.sha256(json.dumps(command).encode())
        files = [self.strata, *(word for word in command if word.endswith(".toml"))]
        files += sorted({part[: part.index(".xml") + 4] for part in command[-3].removeprefix("script:").split(",script:")})
        for path in files:
            digest.update(Path(path).read_bytes())
        return digest.hexdigest()[:16]


def best(rows):
    """At each size the least of several programs' times."""
    return [min(column) for column in zip(*rows)]


def ratio(slow, fast):
    return [a / b for a, b in zip(slow, fast)]
