"""C-Cube's figures by `strata simulate`, and the page that shows them."""

import json
import math
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCALE = ROOT / "scripts/ccube/scale.toml"
LATENCY_US = 3.4
LINK_GBPS = 25.0
MB = 1 << 20


def size_text(nbytes):
    return f"{nbytes >> 20} MB" if nbytes >= MB else f"{nbytes >> 10} KB"


@dataclass
class Answer:
    """A price: milliseconds until the end, and [bytes, ms] of what is final before."""

    ms: float
    first_ms: float
    front: list

    def until(self, nbytes):
        return next((ms for front, ms in self.front if front >= nbytes), self.ms)


class Simulator:
    """Asks `strata simulate`."""

    def __init__(self, strata, folder):
        self.strata, self.folder = strata, folder

    def price(self, machine, nranks, collective, nbytes, method):
        command = [
            str(self.strata), "simulate", "--machine", str(machine), "-n", str(nranks), "--collective", collective,
            "--bytes", str(nbytes), "--method", method, "--front", "--json", "-",
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"ccube-figures: {' '.join(command)}: {run.stderr.strip()}")
        found = json.loads(run.stdout)["cells"][0]["methods"][0]
        return Answer(found["ms"], found["first_ms"], found.get("front", []))

    def machine(self, name, text):
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path


def pieces(depth, trees, nbytes, gbps=LINK_GBPS):
    """Pieces with which equation 7 is least: sqrt(2 D beta N / (t alpha))."""
    return max(1, round(math.sqrt(2 * depth * nbytes / trees / (LATENCY_US * 1e3 * gbps))))


def cut(name, depth, trees, nbytes, gbps=LINK_GBPS):
    segment = max(4096, -(-nbytes // pieces(depth, trees, nbytes, gbps)))
    return f"{name}/segment={segment}/window={2 * depth + 2}"


def phases(simulator, machine, nranks, nbytes, method):
    """The same trees without overlap, B: a reduction, then a broadcast."""
    reduce = simulator.price(machine, nranks, "reduce", nbytes, method)
    broadcast = simulator.price(machine, nranks, "broadcast", nbytes, method)
    front = [[end, reduce.ms + ms] for end, ms in broadcast.front]
    return Answer(reduce.ms + broadcast.ms, reduce.ms + broadcast.first_ms, front)


def dgx1(gbps=LINK_GBPS):
    """The machine, at full or at lower bandwidth."""
    text = (ROOT / "machines/dgx-1.toml").read_text()
    old = "link_gbps = { value = 25.0"
    assert old in text
    return text.replace(old, f"link_gbps = {{ value = {gbps}")


def overlap(simulator):
    """Figure 12."""
    yield "## Figure 12: overlap on a DGX-1\n"
    yield "B is a reduction along the trees and then a broadcast, C1 the overlapped trees. The paper: C1 is 1.75 times as fast at 64 MB, up to 1.80"
    yield "above; twice is the limit. `link_trees` is ours: three trees of depth 2 on 21 of the 24 links.\n"
    yield "| bytes | B: two_trees, ms | C1: two_trees, ms | B / C1 | link_trees, ms | its B / C1 | GB/s | two_trees / link_trees |"
    yield "|---|---|---|---|---|---|---|---|"
    for nbytes in (1 * MB, 16 * MB, 64 * MB, 256 * MB):
        two, link = cut("two_trees", 3, 2, nbytes), cut("link_trees", 2, 3, nbytes)
        both = [phases(simulator, "dgx-1", 8, nbytes, method).ms for method in (two, link)]
        one = [simulator.price("dgx-1", 8, "all_reduce", nbytes, method).ms for method in (two, link)]
        row = [
            size_text(nbytes), f"{both[0]:.3f}", f"{one[0]:.3f}", f"{both[0] / one[0]:.2f}", f"{one[1]:.3f}",
            f"{both[1] / one[1]:.2f}", f"{nbytes / one[1] / 1e6:.1f}", f"{one[0] / one[1]:.2f}",
        ]
        yield f"| {' | '.join(row)} |"
    yield ""


def scale(simulator):
    """Figure 14a."""
    yield "## Figure 14a: overlapped trees and the ring on many ranks\n"
    yield "How many times as fast `two_trees` is as `ring`, each rank on a NIC of its own. The paper: up to 20 for 16 KB and 1 MB, 1.35 for 64 MB, and slower than"
    yield "the ring on few ranks. The ring of 1,024 ranks and 64 MB is by equation 2, which the simulated rings meet within 5 %.\n"
    yield "| ranks | 16 KB | 1 MB | 64 MB |"
    yield "|---|---|---|---|"
    for nranks in (4, 16, 64, 256, 1024):
        row = []
        for nbytes in (16 << 10, MB, 64 * MB):
            depth = nranks.bit_length() - 1
            trees = simulator.price(SCALE, nranks, "all_reduce", nbytes, cut("two_trees", depth, 2, nbytes)).ms
            if nranks > 256 and nbytes > MB:
                ring = 2 * (nranks - 1) * (LATENCY_US + nbytes / nranks / LINK_GBPS / 1e3) / 1e3
            else:
                ring = simulator.price(SCALE, nranks, "all_reduce", nbytes, "ring/segment=whole/window=1").ms
            row.append(f"{ring / trees:.2f}")
        yield f"| {nranks} | {' | '.join(row)} |"
    yield ""


def tree_edges(nranks, first):
    """The edges of the in-order tree of places 1 to nranks, with ranks from `first` on around."""
    edges = set()
    def walk(low, high):
        # The root of a stretch is the place divisible by the greatest power of two.
        if low > high:
            return None
        root = max(range(low, high + 1), key=lambda place: place & -place)
        for child in (walk(low, root - 1), walk(root + 1, high)):
            if child is not None:
                edges.add(tuple(sorted(((root - 1 + first) % nranks, (child - 1 + first) % nranks))))
        return root
    walk(1, nranks)
    return edges


def on_edges(simulator, nranks):
    """A node whose links are those of the trees: of the all-reduce, and of a reduction to rank 0."""
    turned = (nranks + 1 - (1 << (nranks.bit_length() - 1))) % nranks
    edges = sorted(tree_edges(nranks, 0) | tree_edges(nranks, turned))
    head, tail = dgx1().split("[[inside.links]]", 1)
    head = head.replace("ranks = { value = 8", f"ranks = {{ value = {nranks}").replace("rank_gbps = { value = 150.0", "rank_gbps = { value = 1e6")
    head = head.replace("latency_us = { value = 3.4", "latency_us = { value = 0")
    links = "".join(f"[[inside.links]]\nranks = [{one}, {other}]\n" for one, other in edges)
    local = "[local]" + tail.split("[local]", 1)[1].replace("value = 380.0", "value = 1e9").replace("value = 255.0", "value = 1e9")
    return simulator.machine(f"edges-{nranks}", head + links + local)


def turnaround(simulator):
    """Figure 14b."""
    yield "## Figure 14b: turnaround\n"
    yield "How many times as early the first piece is final on all ranks along an overlapped tree as along the same tree in two phases, in K pieces, with a"
    yield "link for each edge, by simulation and by steps: `(2D + K - 1) / 2D`. The paper: 29 on average, up to 69.\n"
    yield "| ranks | K = 16 | by steps | K = 256 | by steps |"
    yield "|---|---|---|---|---|"
    for nranks in (4, 16, 64):
        machine, depth, row = on_edges(simulator, nranks), nranks.bit_length() - 1, []
        for count in (16, 256):
            method, nbytes = f"one_tree/segment={MB}/window={2 * depth + 2}", count * MB
            over = simulator.price(machine, nranks, "all_reduce", nbytes, method).first_ms
            both = phases(simulator, machine, nranks, nbytes, method).first_ms
            row += [f"{both / over:.1f}", f"{(2 * depth + count - 1) / (2 * depth):.1f}"]
        yield f"| {nranks} | {' | '.join(row)} |"
    yield ""


@dataclass
class Layer:
    """Bytes of gradients up to its end, and milliseconds of its forward pass."""

    until: int
    ms: float


def layers(name, images, flops=10e12):
    """A workload's layers, from its file."""
    steps = tomllib.loads((ROOT / f"workloads/ccube-{name}.toml").read_text())["phase"][1]["steps"]
    found = []
    for step in steps:
        if "until" in step:
            found.append(Layer(4 * step["until"], 0.0))
        elif "flops" in step:
            # "2 * MULTIPLY-ADDS * images / share"
            found[-1].ms += 2 * int(step["flops"].split(" * ")[1]) * images / flops * 1e3
    return found


def step_ms(network, answer, follows):
    """A backward pass, an all-reduce, and the next forward pass, which follows the front or waits for the whole."""
    forward = sum(layer.ms for layer in network)
    now = 0.0
    for layer in network:
        now = max(now, answer.until(layer.until) if follows else answer.ms) + layer.ms
    return 2 * forward + now, 3 * forward


def networks(simulator):
    """Figure 13."""
    yield "## Figure 13: training steps\n"
    yield "A step of one network on 8 ranks over the ideal step, which has no communication, is the efficiency of the paper's figure. B: two phases; C1: overlapped; C2: two"
    yield "phases, computing follows the front; CC: both; all along `two_trees`. L: CC along `link_trees`. R: rings by equation 2 on the cycle of double links 0 3 2 1 5 6 7 4, two links each way. Low bandwidth is a"
    yield "quarter. The paper: C1 10 % over B on average (up to 20), CC 32 % (61), up to 31 % over R, slower than R for small batches of ZFNet alone, up to 98 % of ideal.\n"
    yield "| network | bandwidth | images | B | C1 | C2 | CC | R | L | CC over B | CC over R |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    gains, gains_c1, losses = [], [], []
    for name, title in (("zfnet", "ZFNet"), ("vgg16", "VGG-16"), ("resnet50", "ResNet-50")):
        nbytes = layers(name, 1)[-1].until
        for bandwidth, gbps in (("high", LINK_GBPS), ("low", LINK_GBPS / 4)):
            machine = simulator.machine(f"dgx-1-{bandwidth}", dgx1(gbps))
            two, link = cut("two_trees", 3, 2, nbytes, gbps), cut("link_trees", 2, 3, nbytes, gbps)
            overlapped = simulator.price(machine, 8, "all_reduce", nbytes, two)
            apart = phases(simulator, machine, 8, nbytes, two)
            on_links = simulator.price(machine, 8, "all_reduce", nbytes, link)
            ring = 14 * (LATENCY_US + nbytes / 8 / (2 * gbps) / 1e3) / 1e3
            for images in (16, 32, 64, 128):
                network = layers(name, images)
                ways = [
                    (apart, False), (overlapped, False), (apart, True), (overlapped, True),
                    (Answer(ring, ring, []), False), (on_links, True),
                ]
                times = [step_ms(network, answer, follows) for answer, follows in ways]
                b, c1, _, cc, r, _ = (took for took, _ in times)
                gains.append(b / cc)
                gains_c1.append(b / c1)
                if cc > r:
                    losses.append(f"{title}, {bandwidth} bandwidth, {images} images")
                shares = [f"{ideal / took:.2f}" for took, ideal in times]
                yield f"| {title} | {bandwidth} | {images} | {' | '.join(shares)} | {b / cc:.2f} | {r / cc:.2f} |"
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    yield ""
    yield f"C1 over B: {mean(gains_c1):.2f} on average, {max(gains_c1):.2f} at best. CC over B: {mean(gains):.2f} on average, {max(gains):.2f} at best."
    yield f"Slower than the ring: {'; '.join(losses) if losses else 'nowhere'}.\n"


def patterns(simulator):
    """Figure 16."""
    yield "## Figure 16: patterns of computing and parameters\n"
    yield "Eight layers, 64 MB of gradients and as much computing as an all-reduce in two phases takes. Case 1: computing falls and parameters grow from layer to layer;"
    yield "case 2: both grow; case 3: computing and parameters fall. The paper: cases 2 and 3 gain less.\n"
    yield "| case | B, ms | CC, ms | CC over B |"
    yield "|---|---|---|---|"
    method = cut("two_trees", 3, 2, 64 * MB)
    apart = phases(simulator, "dgx-1", 8, 64 * MB, method)
    overlapped = simulator.price("dgx-1", 8, "all_reduce", 64 * MB, method)
    rising = [number / 36 for number in range(1, 9)]
    falling = rising[::-1]
    for case, computing, parameters in (("1", falling, rising), ("2", rising, rising), ("3", falling, falling)):
        network, until = [], 0.0
        for share, part in zip(computing, parameters):
            until += part
            network.append(Layer(min(64 * MB, math.ceil(until * 64 * MB)), share * apart.ms / 2))
        b, cc = step_ms(network, apart, False)[0], step_ms(network, overlapped, True)[0]
        yield f"| {case} | {b:.2f} | {cc:.2f} | {b / cc:.2f} |"
    yield ""


HEAD = """# C-Cube's figures, simulated

Figures of C-Cube (Jo, Son and Kim, HPCA 2023, section V) beside what `strata simulate` gives for the same trees. **Nothing but
[sockets](#measured-on-sockets) was measured.** `scripts/ccube-figures` makes the page again; the paper's numbers are those of its text. The machine is
[dgx-1](../../machines/dgx-1.toml), for many ranks [scale.toml](../../scripts/ccube/scale.toml). Pieces are as many as equation 7 wants.

Figure 5 (4 ranks, 4 chunks: 7 steps instead of 10) and the bounds of this page are held by `cargo test --test ccube`.
"""

MEASURED = """## Measured on sockets

Of everything above this alone was measured: on network namespaces of one machine of 2 processors, with a release build. Results on cables and of `ccube.c` were checked.

| bed | what | figure |
|---|---|---|
| 8 namespaces cabled by dgx-1's links of 100 Mbit/s (`scripts/netns-cluster --links`), 16 MB in segments of 256 KB, window 8 | B / C1 along `two_trees` | 1.98 (1,355 + 1,354 ms to 1,366) |
| | B / C1 along `link_trees` | 1.91 (454 + 452 ms to 475) |
| | `link_trees` over `two_trees` | 2.88; 95 % of three links |
| 16 namespaces of one NIC of 200 Mbit/s, 64 MB | time over the floor `2 (p-1)/p` of the NIC's bytes: `two_trees`, `log`, `ring` | 1.12, 1.09, 1.01 |
| | first segment final, of the whole | 1.4 %, 0.8 %, 0.8 % |
| the same, `ccube-resnet50 --scale 1/8 --flops 1T` | exposed, beside waiting for the whole: `two_trees`, `log` | 87 of 1,113 ms, 43 of 1,079 ms |
| the same with half of the computing (2T) | `two_trees`, `log`, `ring` | 592 of 1,115, 544 of 1,045, 453 of 994 ms |
| 4 ranks as 4 nodes over loopback, `examples/ccube.c` (161 layers of ResNet-50, forward pass 100 ms), `two_trees` | step: whole, ranges, a call a layer | 573, 493, 680 ms |
| | first layer at | 269, 11, 7 ms |
| the same on another day, the machine in its slow state (a cache line takes 250 ns) | step; first layer at | 636, 660, 849 ms; 332, 11, 5 ms |
| 2 namespaces of one NIC of 1 Gbit/s, 16 MB, 161 ranges (`bench/following.c`) | the call whose ranges are waited for, over the call that is waited for as a whole | 1.000 (0.999..1.002) |
| 2 nodes of one rank over loopback, both processors at work in the call, 64 MB; 1, 16, 161 ranges | the same | 1.00, 1.00, 1.03 to 1.07 in four runs: a wait that ends takes a processor from the call for 10 us |
| one rank, a call of 8 bytes on a stream | until the program that waits for its range goes on, the call included | 10.5 us (9.9..11.6); for the stream as a whole 12 to 14 |
| 5,000 such calls that nobody follows, the library before fronts and now, four runs in turns | a call | medians 3.6 to 5.8 and 3.0 to 4.2 us: the difference is below the spread; after the first calls a front takes the memory of an ended one (test) |
| the cabled namespaces, six calls of 16 MB along `two_trees` | processor time of ranks 0 and 1, which relay, and of the other six, in 19.6 s | 5.8 and 4.8 s, and 3.6 to 4.4 s (mean 4.0): 7 % of a processor |

"""

GAPS = """## What falls short, and what is not shown

- The second tree of `two_trees` shares links with the first (0-1, both ways) and detours share links with tree edges (1-3, 0-2), so it has the rate of
  one link, 25 GB/s. The paper avoids that with the second link between GPUs 2 and 3, for trees whose edges it does not list. `link_trees` has no such links.
- The paper gives neither batch sizes nor computing rates in numbers. 10 TFLOP/s a GPU is assumed.
- Detours take links here, and no time of the GPU between: figure 15 (3 to 4 % on the GPUs that forward) is not in the model. On sockets a relay takes 7 % of a processor more than others; what a GPU
  would lose is not known until a transport moves data between a node's GPUs along its links.
- Following 161 ranges costs more than 1 % where every processor works in the call itself.
- Figure 3: the paper has a call a layer take twice the time of one call. Measured over loopback one call whose ranges are followed is 1.38 times as fast as a call a layer along
  `two_trees` (1.29 in the slow state), and the first layer begins 4 to 6 ms later: it waits for a segment of 1.8 MB, and the layer's own call carries 37 KB. With the default algorithm there, the ring, a call a layer is faster: short calls take another algorithm than the long one.
"""


def page(simulator):
    parts = [overlap, networks, scale, turnaround, patterns]
    lines = [HEAD] + [line for part in parts for line in part(simulator)]
    return "\n".join(lines) + "\n" + MEASURED + GAPS
