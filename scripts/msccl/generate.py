#!/usr/bin/env python3
"""Prints a program of MSCCLang's evaluation as XML, for `strata plan verify` and `strata simulate --method script:FILE`.

usage: generate.py ALGORITHM [--nodes N] [--gpus G] [--channels C] [--instances R] [--rails K] [--at-once P] [--protocol P]
                   [-o FILE.xml]

Programs are compiled by `strata plan compile`; STRATA_COMMAND names the command, which otherwise is on the PATH. AllToNext is a
collective of its own: with -o its contract is written beside the file.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "python"))

import algorithms  # noqa: E402

ALGORITHMS = {
    "ring": lambda o: algorithms.ring(o.nodes, o.gpus, o.channels, o.instances, o.protocol),
    "reduce_scatter": lambda o: algorithms.reduce_scatter(o.gpus, o.instances, o.protocol),
    "all_gather": lambda o: algorithms.all_gather(o.gpus, o.instances, o.protocol),
    "all_pairs": lambda o: algorithms.all_pairs(o.gpus, o.instances, o.protocol),
    "hierarchical": lambda o: algorithms.hierarchical(o.nodes, o.gpus, o.instances, o.rails, o.protocol),
    "tree": lambda o: algorithms.tree(o.nodes, o.gpus, o.channels, o.protocol),
    "direct": lambda o: algorithms.direct_all_to_all(o.nodes * o.gpus, o.at_once, o.protocol),
    "two_step": lambda o: algorithms.two_step_all_to_all(o.nodes, o.gpus, o.protocol),
    "next_direct": lambda o: algorithms.next_direct(o.nodes, o.gpus),
    "all_to_next": lambda o: algorithms.all_to_next(o.nodes, o.gpus, o.instances, o.protocol),
}


def positive(text):
    number = int(text)
    if not 1 <= number <= 1024:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 1024")
    return number


def options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--gpus", type=positive, default=8, help="of a node")
    parser.add_argument("--channels", type=positive, default=1, help="over which a ring, or the trees, are spread")
    parser.add_argument("--instances", type=positive, default=1, help="how often the program runs beside itself")
    parser.add_argument("--rails", type=positive, default=1, help="channels between two nodes' ranks (hierarchical)")
    parser.add_argument("--at-once", type=positive, default=8, help="peers in hand at a time (direct)")
    parser.add_argument("--protocol", choices=["Simple", "LL", "LL128"], default="Simple")
    parser.add_argument("-o", "--output", type=Path, help="file; standard output if left out")
    chosen = parser.parse_args(arguments)
    if chosen.nodes * chosen.gpus > 1024:
        parser.error(f"{chosen.nodes} nodes of {chosen.gpus} GPUs are more than 1,024 ranks")
    if chosen.algorithm == "tree" and chosen.nodes != 2:
        parser.error("the tree is for two nodes: --nodes 2")
    if chosen.nodes * chosen.gpus < 2:
        parser.error("a program has at least two ranks")
    return chosen


def generate(chosen, output=None, command=None):
    """Writes the file, and the contract beside it; without an output, prints it. Exits where the command cannot."""
    made = ALGORITHMS[chosen.algorithm](chosen)
    if made.startswith("<"):
        if output is None:
            sys.stdout.write(made)
        else:
            output.write_text(made)
        return
    command = str(command or os.environ.get("STRATA_COMMAND") or "strata")
    line = [command, "plan", "compile", "-", *(["--output", str(output)] if output else [])]
    try:
        ran = subprocess.run(line, input=made, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"generate.py: {command} cannot be run: {error}; STRATA_COMMAND names the command") from None
    if ran.returncode:
        raise SystemExit(ran.returncode)


def main():
    chosen = options(sys.argv[1:])
    generate(chosen, chosen.output)


if __name__ == "__main__":
    main()
