"""What a trace does, found by doing its steps on sets of chunks, without the package that wrote it.

A place holds how often each rank's chunk of the input has gone into it: a Counter of (rank, chunk).
"""

from collections import Counter


def rule_of(text, limit):
    """The numbers in `3` or `1-5`; all where there is no text."""
    first, _, last = (text or f"0-{limit - 1}").partition("-")
    return range(int(first), int(last or first) + 1)


class Run:
    """The buffers of all ranks after the steps of a trace."""

    def __init__(self, trace):
        self.trace = trace
        self.ranks, self.chunks = trace["ranks"], trace["chunks"]
        blocks_in, blocks_out = {
            "all_reduce": (1, 1),
            "all_gather": (1, self.ranks),
            "reduce_scatter": (self.ranks, 1),
            "all_to_all": (self.ranks, self.ranks),
            "custom": (1, 1),
        }[trace["collective"]]
        self.sizes = {"input": blocks_in * self.chunks, "output": blocks_out * self.chunks}
        self.held = {}
        for rank in range(self.ranks):
            for chunk in range(self.sizes["input"]):
                self.held[self.key(rank, "input", chunk)] = Counter({(rank, chunk): 1})
        for step in trace["steps"]:
            self.step(step)

    def key(self, rank, buffer, index):
        """Where a place really is: in place the smaller buffer is a part of the larger one."""
        assert 0 <= rank < self.ranks and index >= 0, (rank, buffer, index)
        if buffer in self.sizes:
            assert index < self.sizes[buffer], (rank, buffer, index)
            if self.trace["in_place"]:
                small = self.sizes[buffer] < max(self.sizes.values())
                return rank, "both", index + (rank * self.chunks if small else 0)
        return rank, buffer, index

    def step(self, step):
        """Does one step. All chunks are read before one is written."""
        moved = []
        for offset in range(step["count"]):
            (src, src_buffer, src_index), (dst, dst_buffer, dst_index) = step["src"], step["dst"]
            place = self.key(dst, dst_buffer, dst_index + offset)
            value = self.held[self.key(src, src_buffer, src_index + offset)]
            moved.append((place, value + self.held[place] if step["op"] == "reduce" else value))
        self.held.update(moved)

    def wanted(self, rank, index):
        """What the collective puts into a chunk of a rank's output; None where it may be anything."""
        block, offset = divmod(index, self.chunks)
        total = lambda chunk: Counter({(peer, chunk): 1 for peer in range(self.ranks)})  # noqa: E731
        collective = self.trace["collective"]
        if collective == "all_reduce":
            return total(index)
        if collective == "all_gather":
            return Counter({(block, offset): 1})
        if collective == "reduce_scatter":
            return total(rank * self.chunks + index)
        if collective == "all_to_all":
            return Counter({(block, rank * self.chunks + offset): 1})
        found = None
        for rule in self.trace["contract"]:
            if rank in rule_of(rule.get("ranks"), self.ranks) and index in rule_of(rule.get("chunks"), self.chunks):
                chunk = rule.get("chunk", index + rule.get("chunk_shift", 0))
                peer = rule.get("rank", rank + rule.get("rank_shift", 0))
                found = total(chunk) if rule.get("reduced") else Counter({(peer, chunk): 1})
        return found

    def faults(self):
        """Chunks of outputs that hold something else than they should."""
        places = [(rank, index) for rank in range(self.ranks) for index in range(self.sizes["output"])]
        pairs = [(place, self.wanted(*place), self.held.get(self.key(place[0], "output", place[1]))) for place in places]
        return [f"{place}: {held}, not {wanted}" for place, wanted, held in pairs if wanted not in (None, held)]
