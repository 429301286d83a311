"""Programs in MSCCL's XML format, built step by step.

A program is written in an order in which it could run on one processor. From that order come the dependencies between thread
blocks: a step waits for the last write of what it reads, and for the last write and all reads of what it writes.
"""

READS = {"s", "rrc", "rrs", "rrcs", "cpy", "re"}
WRITES = {"r", "rcs", "rrc", "rrcs", "cpy", "re"}


class Block:
    """A thread block: at most one rank to send to and one to receive from, on one channel."""

    def __init__(self, number, send, recv, channel):
        self.number, self.send, self.recv, self.channel = number, send, recv, channel
        self.steps = []


class Program:
    """Steps of all ranks. `chunks` is the number of chunks of a rank's larger buffer."""

    def __init__(self, name, collective, nranks, chunks, protocol="Simple", in_place=False):
        self.name, self.collective, self.nranks, self.chunks = name, collective, nranks, chunks
        self.protocol, self.in_place = protocol, in_place
        self.blocks = [{} for _ in range(nranks)]
        self.written = [{} for _ in range(nranks)]
        self.read = [{} for _ in range(nranks)]
        self.scratch = [0] * nranks

    def block(self, rank, send=-1, recv=-1, channel=0):
        """The rank's thread block with these peers, made where it is not there."""
        blocks = self.blocks[rank]
        key = (send, recv, channel)
        if key not in blocks:
            blocks[key] = Block(len(blocks), send, recv, channel)
        return blocks[key]

    def step(self, rank, block, kind, src=("i", 0), dst=("i", 0), count=1):
        """Adds a step to a thread block. `src` and `dst` are a buffer (i, o, s) and a chunk of it."""
        reads = self._places(src, count) if kind in READS else []
        if kind == "re":
            reads = reads + self._places(dst, count)
        writes = self._places(dst, count) if kind in WRITES else []
        waits = {}
        for place in reads + writes:
            self._wait(waits, self.written[rank].get(place))
        for place in writes:
            for reader in self.read[rank].get(place, ()):
                self._wait(waits, reader)
        waits.pop(block.number, None)
        waits = sorted(waits.items())
        for wait in waits[:-1]:
            block.steps.append(("nop", ("i", -1), ("i", -1), 0, wait))
        block.steps.append((kind, src, dst, count, waits[-1] if waits else None))
        here = (block.number, len(block.steps) - 1)
        for place in reads:
            self.read[rank].setdefault(place, []).append(here)
        for place in writes:
            self.written[rank][place] = here
            self.read[rank].pop(place, None)
        for buffer, chunk in [src] * (kind in READS) + [dst] * (kind in WRITES):
            if buffer == "s":
                self.scratch[rank] = max(self.scratch[rank], chunk + count)

    def _places(self, start, count):
        buffer, chunk = start
        if self.in_place and buffer == "o":
            buffer = "i"
        return [(buffer, chunk + index) for index in range(count)]

    @staticmethod
    def _wait(waits, step):
        """A later step of a thread block ends after an earlier one: only the last counts."""
        if step is not None:
            waits[step[0]] = max(waits.get(step[0], -1), step[1])

    def xml(self):
        """The text of the file."""
        needed = {
            (rank, wait)
            for rank, blocks in enumerate(self.blocks)
            for block in blocks.values()
            for *_, wait in block.steps
            if wait
        }
        channels = 1 + max(block.channel for blocks in self.blocks for block in blocks.values())
        lines = [
            f'<algo name="{self.name}" proto="{self.protocol}" nchannels="{channels}" nchunksperloop="{self.chunks}" '
            f'ngpus="{self.nranks}" coll="{self.collective}" inplace="{int(self.in_place)}" outofplace="1" '
            'minBytes="0" maxBytes="0">'
        ]
        inputs, outputs = self._sizes()
        for rank, blocks in enumerate(self.blocks):
            lines.append(
                f' <gpu id="{rank}" i_chunks="{inputs}" o_chunks="{outputs}" s_chunks="{self.scratch[rank]}">'
            )
            for block in blocks.values():
                lines.append(
                    f'  <tb id="{block.number}" send="{block.send}" recv="{block.recv}" chan="{block.channel}">'
                )
                for index, (kind, src, dst, count, wait) in enumerate(block.steps):
                    dep, deps = wait or (-1, -1)
                    has = int((rank, (block.number, index)) in needed)
                    lines.append(
                        f'   <step s="{index}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1]}" dstbuf="{dst[0]}" '
                        f'dstoff="{dst[1]}" cnt="{count}" depid="{dep}" deps="{deps}" hasdep="{has}"/>'
                    )
                lines.append("  </tb>")
            lines.append(" </gpu>")
        lines.append("</algo>")
        return "\n".join(lines) + "\n"

    def _sizes(self):
        per_rank = self.chunks // self.nranks
        return {
            "allgather": (per_rank, self.chunks),
            "reducescatter": (self.chunks, per_rank),
        }.get(self.collective, (self.chunks, self.chunks))
