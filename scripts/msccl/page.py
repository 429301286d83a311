"""The page docs/simulation/msccl.md."""

from prices import size_text

HEAD = """# MSCCLang's figures, simulated

Speedups of MSCCLang's programs (Cowan et al., ASPLOS 2023, section 7) beside those that `strata simulate` gives for the same
algorithms. **Nothing on this page was measured.** `scripts/simulate-msccl` makes it again; the paper's numbers are those of its
text; nothing was read off its plots.

```sh
scripts/simulate-msccl                              # this page
scripts/simulate-msccl --only 8g --without lanes    # one figure, without a term of the machine
scripts/msccl/generate.py ring --channels 4 --instances 8 --protocol LL128 -o ring.xml    # one of the programs
strata simulate --machine ndv4 --collective all_reduce -n 8 --bytes 1K..1G --method script:ring.xml
```
"""

METHOD = """## What is simulated, and what is fitted

The programs are written in the language of msccl-tools (`scripts/msccl/algorithms.py`) and compiled by `strata plan compile`; NCCL's
all-to-all alone is written as XML, since the language cannot say how many messages are in hand. Steps are in the compiler's order, by
depth: in all-pairs the two ranks of a pair send at the same time. Strata proves the files and its executor runs them under a
virtual clock on [ndv4](../../machines/ndv4.toml) (8 A100 and 8 NICs a node) or [dgx2](../../machines/dgx2.toml) (16 V100 and 8 NICs).
Each size has the best of several instance counts and protocols, and of the cuts into segments; segments are the interpreter's tiles.

| term | its numbers are from | fitted |
|---|---|---|
| NICs, NVLinks, ways out (`out`) | the paper's section 7, data sheets, NCCL's topology source | no |
| protocols (`protocols`) | NCCL 2.8's tuning source, the release on which MSCCLang is built | LL128's latency inside a node, 0.8 us: to figure 8a |
| one connection (`lanes`) | inside: 20 GB/s, NCCL's tuning source | between nodes, 12.5 GB/s: to figure 8g |
| launch (`launch`) | NCCL's base latency, 6.6 us a call | 0.05 us a thread block: to nothing, the paper only says that blocks cost time |

NCCL, too, is a program: a ring on one channel, 24 times, as section 7.1.1 describes it; on two nodes also its tree, each channel
leaving the node through another NIC. It runs in the protocol that NCCL 2.8's own model (`scripts/msccl/vendor.py`) takes for the
size. For all-to-all NCCL is a message to each rank, eight in hand at a time. By hand, the two-step all-to-all is NCCL's messages inside
the node, a kernel that copies, and NCCL's messages between nodes, one after the other. The composed all-reduce is a
reduce-scatter, an all-reduce of each rail and an all-gather, each a call with its launch.
"""

GAPS = """## What falls short, and what is out of reach

- **8a, several channels.** The paper gives overlap of sends and receives as the reason for 1.9. Here a ring over several channels wins
  only through its protocol: NCCL's model holds LL128's hop for 1.9 us and stays with LL up to 1.2 MB, where LL128 is faster. One channel
  with 24 instances in LL128 wins as much or more. The simulator has no cost that a thread block would save by
  sending on one channel while it receives on another, beyond latencies of different segments; with connections of 20 GB/s, fewer
  instances lose more than that saves.
- **8a, protocol of all-pairs.** The text names none. LL is shown, at its best at 1 KB; in LL128 (four instances) the greatest is 2.17, at 1 MB.
- **8c above 1 GB.** The simulated hierarchical all-reduce keeps NVLinks busy 97 % of the time; nothing in the model keeps its phases
  from overlapping perfectly, which on the machine they did not.
- **8b and 8d.** The text has no numbers ("similar trends are seen on the V100 system"), so only the trend can be held against them.
  8d differs at 4 sizes, 2 to 16 MB: NCCL wins there on A100 and nowhere on V100. Two V100 share a NIC, which NCCL's ring keeps busy for 91 % of the
  time at 4 MB (68 % on A100), with twice the hierarchical program's bytes.
- **8e.** Above some size both the program and NCCL fill the NICs here, so they take the same time. On the machine NCCL's many messages cost
  the NIC something ("high overhead costs of IB"). About 15 us a message would let NCCL overtake the hand-written implementation at
  512 MB; but the same cost for the rings of 8c, three messages to a NIC and hop, would make them several times as slow as
  NCCL is, so it is no term of the machine. The text has no code of the hand-written implementation, and speaks of fluctuations between 2
  and 64 MB by other tenants' traffic, which no model here has. Its caption says 16 nodes and 256 GPUs, which are 32 nodes of 8: both
  are shown.
- **8f** has no numbers in the text.
- **Figure 11** compares two runtimes on a DGX-1 (direct copies against slots). Strata's simulator has no second runtime, and the text gives
  no ratio: out of reach.
- **Section 7.6** (Copilot 20 % faster, a mixture of experts 1.10 to 1.89 times) is of whole applications on Azure: out of reach.
"""


def text(milliseconds):
    return f"{milliseconds * 1e3:.1f} us" if milliseconds < 1 else f"{milliseconds:.2f} ms"


def claims(figures):
    lines = ["| figure | what | paper | simulated | reached |", "|---|---|---|---|---|"]
    for figure in figures:
        for what, paper, ours, reached in figure.claims:
            mark = {True: "yes", False: "**no**", None: "no number"}[reached]
            lines.append(f"| {figure.name} | {what} | {paper} | {ours} | {mark} |")
    return "\n".join(lines) + "\n"


def table(figure):
    names = list(figure.speedups)
    head = ["bytes", f"{figure.baseline}, time", *figure.notes, *names]
    lines = [f"### {figure.title}", "", f"Times as fast as {figure.baseline}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---:|---:|" + "---|" * len(figure.notes) + "---:|" * len(names)]
    for at, size in enumerate(figure.sizes):
        row = [size_text(size), text(figure.times[figure.baseline][at])]
        row += [str(column[at]) for column in figure.notes.values()]
        row += [f"{figure.speedups[name][at]:.2f}" for name in names]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def tables(figures):
    return claims(figures) + "\n" + "\n".join(table(figure) for figure in figures)


def page(figures):
    paper = "## The paper's numbers\n\nReached is within 25 % for 8a and within 15 % for the others.\n\n" + claims(figures)
    return "\n".join([HEAD, paper, METHOD, GAPS, "## The figures\n", "\n".join(table(figure) for figure in figures)])
