"""Prices of programs by `strata simulate`, each the best of the ways in which it can be cut into segments."""

import json
import subprocess
from pathlib import Path

import generate

# How a program may be cut: whole, or in segments of so many bytes of each block, so many in flight.
WHOLE = [""]
CUT = ["", "/segment=1M/window=8", "/segment=8M/window=8", "/segment=64M/window=4"]


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
        self.strata, self.folder, self.without = strata, Path(folder), without

    def program(self, algorithm, **options):
        """The file of a program, made where it is not there."""
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        name = "-".join([algorithm] + [f"{key}{value}" for key, value in options.items()])
        path = self.folder / f"{name}.xml"
        if not path.exists():
            text, contract = generate.generate(generate.options([algorithm, *words]))
            path.write_text(text)
            if contract:
                path.with_suffix(".toml").write_text(contract)
        return path

    def times(self, machine, collective, nranks, sizes, programs, cuts=WHOLE):
        """For each program the milliseconds at each size, by the best of the cuts."""
        methods = [f"script:{program}{cut}" for program in programs for cut in cuts]
        command = [
            self.strata, "simulate", "--machine", str(machine), "--collective", collective, "-n", str(nranks),
            "--bytes", ",".join(map(str, sizes)), "--method", ",".join(methods), "--json", "-",
        ]
        for term in self.without:
            command += ["--without", term]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"simulate-msccl: {' '.join(command[:8])} ...: {run.stderr.strip()}")
        cells = json.loads(run.stdout)["cells"]
        assert len(cells) == len(sizes) and all(len(cell["methods"]) == len(methods) for cell in cells)
        found = []
        for place in range(len(programs)):
            ways = range(place * len(cuts), (place + 1) * len(cuts))
            found.append([min(cell["methods"][way]["ms"] for way in ways) for cell in cells])
        return found


def best(rows):
    """At each size the least of several programs' times."""
    return [min(column) for column in zip(*rows)]


def ratio(slow, fast):
    return [a / b for a, b in zip(slow, fast)]
