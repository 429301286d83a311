#!/usr/bin/env python3
"""The simulator and the choice against reality, on nodes whose NICs are the limit (scripts/netns-cluster), in one run.

usage: scripts/bench-model [--strata target/release/strata] [--nodes 4] [--nics 4] [--rate 200mbit] [--repeats 3]
                           [--bytes 1M..32M] [--collectives all_gather] [--algorithms A;B;...]

Measures algorithms at sizes by `strata perf`, in turns, and prints beside the
median what `strata simulate --machine machines/netns.toml` says, and how far that is off. Then the same for what Strata takes
by itself, against the best of the others. Exit status 77: this machine cannot do it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = "two_level(direct,log);two_level(direct,ring);ring;log;direct"
# What stands for an algorithm in a collective that it does not do.
INSTEAD = {("all_reduce", "direct"): "rd"}
VARIABLE = {"all_gather": "ALLGATHER", "reduce_scatter": "REDUCESCATTER", "all_reduce": "ALLREDUCE"}
# Segments and window of every run, in bytes of a message and segments in flight: the simulator must have the same.
SEGMENT, WINDOW = 1 << 20, 4


def size(text):
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def sizes(text):
    if ".." not in text:
        return [size(part) for part in text.split(",")]
    least, most = map(size, text.split(".."))
    found = []
    while least <= most:
        found.append(least)
        least *= 2
    return found


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strata")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--nics", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bytes", type=sizes, default=sizes("1M..32M"))
    parser.add_argument("--collectives", default="all_gather")
    parser.add_argument("--algorithms", default=ALGORITHMS)
    return parser.parse_args()


class Cluster:
    """A cluster, for as long as the block."""

    def __init__(self, given):
        self.given = given
        self.name = f"bench-model-{os.getpid()}"

    def __enter__(self):
        given = self.given
        shape = ["--nodes", str(given.nodes), "--nics", str(given.nics), "--ranks", str(given.nics), "--rate", given.rate]
        subprocess.run([ROOT / "scripts/netns-cluster", "up", "--name", self.name, *shape], check=True)
        return self

    def __exit__(self, *_):
        subprocess.run([ROOT / "scripts/netns-cluster", "down", "--name", self.name], check=False)

    def perf(self, strata, collective, settings, bytes_list):
        """Microseconds for each size, out of place."""
        environment = dict(os.environ, STRATA_INTER="tcp", NCCL_COMM_ID="node0:27182", STRATA_NCCL_LIB="none", **settings)
        least, most = min(bytes_list), max(bytes_list)
        command = [ROOT / "scripts/netns-cluster", "run", "--name", self.name, "--each", "rank", "--", strata, "perf"]
        command += [collective, "-b", str(least), "-e", str(most), "-f", "2", "-n", "3", "-w", "1", "-c", "0"]
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        found = {}
        for line in out.splitlines():
            fields = line.split()
            if len(fields) > 6 and fields[0].isdigit():
                found[int(fields[0])] = float(fields[5])
        return found


def simulated(strata, machine, nranks, collective, algorithms, bytes_list):
    """Microseconds for each algorithm and size."""
    block = max(SEGMENT // nranks, 4096) if collective != "all_reduce" else SEGMENT
    methods = [f"{algorithm}/segment={block}/window={WINDOW}" for algorithm in algorithms]
    command = [strata, "simulate", "--machine", machine, "-n", str(nranks), "--collective", collective, "--json", "-"]
    command += ["--bytes", ",".join(map(str, bytes_list)), "--method", ",".join(methods)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {algorithm: {} for algorithm in algorithms}
    for message, cell in zip(bytes_list, json.loads(out)["cells"]):
        for algorithm, method in zip(algorithms, cell["methods"]):
            found[algorithm][message] = method["ms"] * 1e3
    return found


def spread(values):
    return statistics.median(values), min(values), max(values)


def main():
    given = options()
    strata = given.strata
    if not strata:
        subprocess.run(["cargo", "build", "--locked", "--release", "--lib", "--bin", "strata"], cwd=ROOT, check=True)
        strata = ROOT / "target/release/strata"
    strata = str(Path(strata).resolve())
    if subprocess.run([ROOT / "scripts/netns-cluster", "check"], check=False).returncode != 0:
        sys.exit(77)
    machine = str(ROOT / "machines/netns.toml")
    nranks = given.nodes * given.nics
    fixed = {"STRATA_WINDOW": str(WINDOW)}
    print(f"# {os.uname().sysname} {os.uname().release}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; "
          f"{given.nodes} nodes of {given.nics}, {given.rate}")
    near = cells = good = choices = 0
    with Cluster(given) as cluster:
        for collective in given.collectives.split(","):
            names = [INSTEAD.get((collective, name), name) for name in given.algorithms.split(";")]
            ways = {name: {f"STRATA_{VARIABLE[collective]}_ALGO": name, **fixed} for name in names}
            ways["strata's choice"] = {}
            times = {name: {message: [] for message in given.bytes} for name in ways}
            for _ in range(given.repeats):
                for name, settings in ways.items():
                    for message, us in cluster.perf(strata, collective, settings, given.bytes).items():
                        times[name][message].append(us)
            print(f"\n{collective}: ms measured (least to most) | simulated | error")
            every = simulated(strata, machine, nranks, collective, names, given.bytes)
            for name in names:
                expected = every[name]
                for message in given.bytes:
                    middle, least, most = spread(times[name][message])
                    error = expected[message] / middle - 1
                    cells, near = cells + 1, near + (abs(error) <= 0.2)
                    print(f"{name:<24} {message >> 10:>8} KiB {middle / 1e3:>9.2f} ({least / 1e3:.2f} to {most / 1e3:.2f}) | "
                          f"{expected[message] / 1e3:>9.2f} | {error * 100:>5.0f} %")
            for message in given.bytes:
                best = min((statistics.median(times[name][message]), name) for name in names)
                taken = statistics.median(times["strata's choice"][message])
                choices, good = choices + 1, good + (taken <= 1.1 * best[0])
                print(f"strata's choice          {message >> 10:>8} KiB {taken / 1e3:>9.2f}, {taken / best[0]:.2f} times the best, {best[1]}")
    print(f"\n# {near} of {cells} cells within 20 %; {good} of {choices} choices within 10 % of the best that was measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
