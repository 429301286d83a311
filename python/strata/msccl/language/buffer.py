"""Scratch buffers, which grow as they are written."""


class BufferSlice:
    """The chunks of a rank's scratch buffer."""

    def __init__(self, name):
        self.name = name
        self.chunks = []

    def instance_size(self):
        """How many chunks there are; a copy without an index goes behind them."""
        return len(self.chunks)

    def __len__(self):
        return len(self.chunks)

    def __getitem__(self, index):
        return self.chunks[index]

    def __setitem__(self, index, value):
        self.chunks += [None] * (index + 1 - len(self.chunks))
        self.chunks[index] = value
