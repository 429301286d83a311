"""The figures 8a to 8g of MSCCLang's paper (Cowan et al., ASPLOS 2023), simulated."""

import re

import vendor
from prices import best, cut, powers, ratio, size_text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# The rate of the bus in NCCL's model: NVLinks at 20 GB/s each.
AMPERE = {"bus": 240.0, "channels": 24, "ampere": True}
VOLTA = {"bus": 120.0, "channels": 24, "ampere": False}


class Figure:
    """A table of speedups over a baseline, and what the paper says beside what was found."""

    def __init__(self, title, sizes, baseline, times):
        self.title, self.sizes = title, sizes
        self.name = title.split(":")[0]
        self.baseline, self.times = baseline, times
        self.speedups = {name: ratio(times[baseline], row) for name, row in times.items() if name != baseline}
        self.notes = {}
        self.claims = []

    def at(self, name, first, last):
        """The speedups of a range of sizes, with the sizes."""
        return [(s, size) for s, size in zip(self.speedups[name], self.sizes) if first <= size <= last]

    def peak(self, name, first=0, last=1 << 60):
        return max(self.at(name, first, last))

    def claim(self, what, paper, ours, reached):
        self.claims.append((what, paper, ours, reached))


    def winners(self, names):
        """At each size the fastest of these and the baseline, which wins where they are less than 2 % faster."""
        rows = [self.speedups[name] for name in names]
        fastest = [max(zip(column, names)) for column in zip(*rows)]
        return {size: name if speed > 1.02 else self.baseline for size, (speed, name) in zip(self.sizes, fastest)}


def same_winners(figure, other, names):
    """Claims that the same algorithm wins at each size that both figures have."""
    here, there = figure.winners(names), other.winners(names)
    same = sum(here[size] == there[size] for size in here)
    figure.claim(
        f"the winner at each size is that of {other.name}", "\"similar trends\"", f"at {same} of {len(here)}", same == len(here)
    )


def within(value, wanted, part):
    return abs(value - wanted) <= part * wanted


def nccl_ring(prices, machine, gpus, sizes, model):
    """NCCL's ring on one node in the protocol that it takes for each size."""
    rings = [prices.program("ring", gpus=gpus, instances=24, protocol=protocol) for protocol in vendor.PROTOCOLS]
    rows = prices.times(machine, "all_reduce", gpus, sizes, rings)
    takes = [vendor.choice(size, 1, gpus, **model, algorithms=("ring",))[1] for size in sizes]
    times = [rows[vendor.PROTOCOLS.index(protocol)][at] for at, protocol in enumerate(takes)]
    return times, takes


def one_node(prices, machine, gpus, model, title):
    """Ring and all-pairs on one node against NCCL's ring."""
    sizes = powers(KIB, GIB)
    nccl, takes = nccl_ring(prices, machine, gpus, sizes, model)
    rings = [
        prices.program("ring", gpus=gpus, channels=channels, instances=instances, protocol=protocol)
        for channels, instances in ((4, 8), (4, 2), (gpus, 2), (1, 4), (1, 24))
        for protocol in vendor.PROTOCOLS
    ]
    rows = prices.times(machine, "all_reduce", gpus, sizes, rings)
    pairs = [prices.program("all_pairs", gpus=gpus, instances=instances, protocol="LL") for instances in (1, 2, 4)]
    pairs = best(prices.times(machine, "all_reduce", gpus, sizes, pairs))
    # The first nine of the rings are those over several channels.
    spread = {"ring": best(rows), "ring, several channels": best(rows[:9])}
    figure = Figure(title, sizes, "NCCL", {"NCCL": nccl, **spread, "all-pairs, LL": pairs})
    figure.notes["NCCL takes"] = takes
    return figure


def figure_8a(prices):
    figure = one_node(prices, "ndv4", 8, AMPERE, "8a: all-reduce on one node of 8 A100")
    peak, size = figure.peak("ring", 32 * KIB, 3 * MIB)
    most, at = figure.peak("ring")
    inside = 32 * KIB <= at <= 3 * MIB
    figure.claim(
        "ring / NCCL, 32 KB to 3 MB", "up to 1.9", f"{peak:.2f} at {size_text(size)}",
        within(peak, 1.9, 0.25) and inside and most == peak,
    )
    peak, size = figure.peak("ring, several channels", 32 * KIB, 3 * MIB)
    figure.claim(
        "the same, several channels alone", "up to 1.9", f"{peak:.2f} at {size_text(size)}", within(peak, 1.9, 0.25)
    )
    large = [s for s, _ in figure.at("ring", 32 * MIB, GIB)]
    figure.claim("ring / NCCL from 32 MB on", "1", f"{min(large):.2f} to {max(large):.2f}", max(large) < 1.05)
    peak, size = figure.peak("all-pairs, LL", KIB, MIB)
    figure.claim("all-pairs / NCCL, 1 KB to 1 MB", "up to 1.8", f"{peak:.2f} at {size_text(size)}", within(peak, 1.8, 0.25))
    return figure


def figure_8b(prices, a100):
    figure = one_node(prices, "dgx2", 16, VOLTA, "8b: all-reduce on one node of 16 V100")
    peak, size = figure.peak("ring")
    figure.claim("ring / NCCL", "no number in the text", f"up to {peak:.2f} at {size_text(size)}", None)
    peak, size = figure.peak("all-pairs, LL")
    figure.claim("all-pairs / NCCL", "no number in the text", f"up to {peak:.2f} at {size_text(size)}", None)
    same_winners(figure, a100, ["ring", "all-pairs, LL"])
    return figure


def number(text, name):
    """Where the text of a machine's file has a number that it has once."""
    return re.search(rf"^{name} = {{ value = ([0-9.]+)", text, re.M)


def rail_machine(prices, machine):
    """The machine with nodes of one rank: the ranks of one rail, each with its share of a NIC."""
    text = (prices.machines / f"{machine}.toml").read_text()
    share = float(number(text, "nics")[1]) / float(number(text, "ranks")[1])
    wanted = {"ranks": 1, "nics": 1, "nic_gbps": float(number(text, "nic_gbps")[1]) * share}
    for name, value in wanted.items():
        begin, end = number(text, name).span(1)
        text = f"{text[:begin]}{value}{text[end:]}"
    path = prices.folder / f"{machine}-rail.toml"
    path.write_text(text)
    return path


def composed(prices, machine, nodes, gpus, sizes):
    """The hierarchical all-reduce by calls of NCCL, one after the other, each with a launch of its own."""
    protocols = ("LL", "Simple")
    halves = 0
    for algorithm, collective in (("reduce_scatter", "reduce_scatter"), ("all_gather", "all_gather")):
        programs = [
            prices.program(algorithm, gpus=gpus, instances=24, protocol=protocol) for protocol in protocols
        ]
        row = best(prices.times(machine, collective, gpus, sizes, programs, cut))
        halves = row if not halves else [a + b for a, b in zip(halves, row)]
    rings = [prices.program("ring", nodes=nodes, gpus=1, instances=8, protocol=protocol) for protocol in protocols]
    rail = rail_machine(prices, machine)
    between = best(prices.times(rail, "all_reduce", nodes, [size // gpus for size in sizes], rings))
    return [a + b for a, b in zip(halves, between)]


def two_nodes(prices, machine, gpus, model, title):
    """Hierarchical all-reduce on two nodes against NCCL's ring and tree, and against the same composed of calls."""
    sizes = powers(4 * KIB, 4 * GIB)
    nranks = 2 * gpus
    rows = {}
    for protocol in vendor.PROTOCOLS:
        programs = [
            prices.program("ring", nodes=2, gpus=gpus, instances=24, protocol=protocol),
            prices.program("tree", nodes=2, gpus=gpus, channels=24, protocol=protocol),
        ]
        ring, tree = prices.times(machine, "all_reduce", nranks, sizes, programs, cut)
        rows["ring", protocol], rows["tree", protocol] = ring, tree
    takes = [vendor.choice(size, 2, gpus, **model) for size in sizes]
    nccl = [rows[way][at] for at, way in enumerate(takes)]
    programs = [
        prices.program("hierarchical", nodes=2, gpus=gpus, instances=instances, rails=rails, protocol=protocol)
        for instances, rails in ((1, 1), (4, 2), (8, 4))
        for protocol in vendor.PROTOCOLS
    ]
    ours = best(prices.times(machine, "all_reduce", nranks, sizes, programs, cut))
    calls = composed(prices, machine, 2, gpus, sizes)
    figure = Figure(title, sizes, "NCCL", {"NCCL": nccl, "hierarchical": ours, "composed of calls": calls})
    figure.notes["NCCL takes"] = [f"{algorithm} {protocol}" for algorithm, protocol in takes]
    return figure


def figure_8c(prices):
    figure = two_nodes(prices, "ndv4", 8, AMPERE, "8c: all-reduce on two nodes of 8 A100")
    peak, size = figure.peak("hierarchical", 0, MIB)
    figure.claim("hierarchical / NCCL, small", "up to 1.4", f"{peak:.2f} at {size_text(size)}", within(peak, 1.4, 0.15))
    peak, size = figure.peak("hierarchical", GIB)
    figure.claim("hierarchical / NCCL above 1 GB", "up to 1.11", f"{peak:.2f} at {size_text(size)}", within(peak, 1.11, 0.15))
    calls = figure.speedups["composed of calls"]
    slower = sum(c < 1 and c < h for c, h in zip(calls, figure.speedups["hierarchical"]))
    figure.claim("composed of calls", "slower than both", f"at {slower} of {len(calls)} sizes", slower == len(calls))
    return figure


def figure_8d(prices, a100):
    figure = two_nodes(prices, "dgx2", 16, VOLTA, "8d: all-reduce on two nodes of 16 V100")
    peak, size = figure.peak("hierarchical")
    figure.claim("hierarchical / NCCL", "no number in the text", f"up to {peak:.2f} at {size_text(size)}", None)
    same_winners(figure, a100, ["hierarchical"])
    return figure


def figure_8e(prices, nodes):
    """All-to-all: two steps as a program, the same by hand, and NCCL's messages. Sizes are of a rank's whole buffer."""
    gpus, machine = 8, "ndv4"
    nranks = nodes * gpus
    sizes = powers(2 * MIB, 4 * GIB)
    two = prices.program("two_step", nodes=nodes)
    direct = prices.program("direct", nodes=nodes, at_once=8)
    blocks = [size // nranks for size in sizes]
    ours, nccl = prices.times(machine, "all_to_all", nranks, blocks, [two, direct])
    inside = prices.program("direct", gpus=gpus, at_once=8)
    (first,) = prices.times(machine, "all_to_all", gpus, [size // gpus for size in sizes], [inside])
    between = prices.program("direct", nodes=nodes, gpus=1, at_once=8)
    rail = rail_machine(prices, machine)
    (second,) = prices.times(rail, "all_to_all", nodes, [size // nodes for size in sizes], [between])
    text = (prices.machines / f"{machine}.toml").read_text()
    copy_gbps, launch_us = (float(number(text, name)[1]) for name in ("copy_gbps", "call_us"))
    hand = [a + b + size / copy_gbps / 1e6 + launch_us / 1e3 for a, b, size in zip(first, second, sizes)]
    figure = Figure(
        f"8e: all-to-all on {nodes} nodes of 8 A100", sizes, "two-step by hand",
        {"two-step by hand": hand, "two-step": ours, "NCCL": nccl},
    )
    figure.name = f"8e, {nodes} nodes"
    peak, size = figure.peak("two-step", 64 * MIB)
    figure.claim("two-step / by hand, large", "up to 1.3", f"{peak:.2f} at {size_text(size)}", within(peak, 1.3, 0.15))
    over = figure.at("NCCL", 513 * MIB, 4 * GIB)
    figure.claim("NCCL / by hand above 512 MB", "above 1", f"{min(over)[0]:.2f} to {max(over)[0]:.2f}", min(over)[0] > 1)
    first = next(size for speed, size in figure.at("NCCL", 0, 4 * GIB) if speed > 1)
    figure.claim("NCCL overtakes what is written by hand", "at 512 MB", f"at {size_text(first)}", first == 512 * MIB)
    over = [(n / t, size) for n, t, size in zip(nccl, ours, sizes) if size > 512 * MIB]
    low, high = min(over)[0], max(over)[0]
    figure.claim(
        "two-step / NCCL above 512 MB", "1.2", f"{low:.2f} to {high:.2f}", within(low, 1.2, 0.15) and within(high, 1.2, 0.15)
    )
    return figure


def tiles(size):
    """Scattering, crossing and gathering overlap only between segments, so these are short."""
    if size < 2 << 20:
        return [""]
    return ["", "/segment=1M/window=8"] if size <= 64 << 20 else ["", "/segment=4M/window=8"]


def figure_8g(prices):
    sizes = powers(KIB, GIB)
    counts = (1, 2, 4, 8, 16)
    programs = [prices.program("all_to_next", nodes=3, instances=instances) for instances in counts]
    programs = [prices.program("next_direct", nodes=3), *programs]
    baseline, *rows = prices.times("ndv4", "custom", 24, sizes, programs, tiles)
    figure = Figure(
        "8g: AllToNext on three nodes of 8 A100", sizes, "direct",
        {"direct": baseline, "AllToNext": best(rows)} | {f"r = {r}": row for r, row in zip(counts, rows)},
    )
    peak, size = figure.peak("AllToNext")
    figure.claim("AllToNext / direct, large", "up to 14.5", f"{peak:.2f} at {size_text(size)}", within(peak, 14.5, 0.15))
    wires, *rows = prices.without_terms("lanes").times("ndv4", "custom", 24, [GIB], programs, tiles)
    alone = wires[0] / min(row[0] for row in rows)
    figure.claim("by the NICs alone (`--without lanes`)", "at most 8", f"{alone:.2f} at 1G", within(alone, 7, 0.15))
    small = figure.speedups["AllToNext"][0]
    figure.claim("AllToNext / direct, small", "below 1", f"{small:.2f} at {size_text(sizes[0])}", small < 1)
    return figure


FIGURES = {
    "8a": lambda prices: [figure_8a(prices)],
    "8b": lambda prices: [figure_8b(prices, figure_8a(prices))],
    "8c": lambda prices: [figure_8c(prices)],
    "8d": lambda prices: [figure_8d(prices, figure_8c(prices))],
    "8e": lambda prices: [figure_8e(prices, 16), figure_8e(prices, 32)],
    "8g": lambda prices: [figure_8g(prices)],
}
