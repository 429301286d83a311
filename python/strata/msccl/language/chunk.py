"""What a place in a buffer holds: one rank's chunk, or a reduction of several."""


class Chunk:
    """A chunk of a rank's input. `dst_rank` and `dst_index` are for the program's use: where the chunk belongs in the end."""

    def __init__(self, origin_rank, origin_index, dst_rank=-1, dst_index=-1):
        self.origin_rank = origin_rank
        self.origin_index = origin_index
        self.dst_rank = dst_rank
        self.dst_index = dst_index

    def _key(self):
        return (self.origin_rank, self.origin_index)

    def reduce(self, *arguments):
        """The reduction of this chunk and another: `reduce(rank, other)`; the rank may be left out."""
        rank, other = _rank_and(arguments)
        return ReduceChunk(rank, [self] + (other.chunks if isinstance(other, ReduceChunk) else [other]))

    def __eq__(self, other):
        return isinstance(other, Chunk) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __lt__(self, other):
        return self._key() < other._key()

    def __repr__(self):
        return f"Chunk(origin_rank={self.origin_rank}, origin_index={self.origin_index})"


class ReduceChunk:
    """A reduction of chunks. Two are equal that reduce the same chunks, in whatever order."""

    def __init__(self, *arguments):
        self.creation_rank, chunks = _rank_and(arguments)
        self.chunks = list(chunks)

    def reduce(self, *arguments):
        """The reduction of this and another: `reduce(rank, other)`; the rank may be left out."""
        _, other = _rank_and(arguments)
        return ReduceChunk(
            self.creation_rank, self.chunks + (other.chunks if isinstance(other, ReduceChunk) else [other])
        )

    def __eq__(self, other):
        return isinstance(other, ReduceChunk) and sorted(self.chunks) == sorted(other.chunks)

    def __hash__(self):
        return hash(tuple(sorted(self.chunks)))

    def __repr__(self):
        return f"ReduceChunk({', '.join(str(chunk._key()) for chunk in sorted(self.chunks))})"


def _rank_and(arguments):
    """Releases of msccl-tools differ in whether the rank that reduces is told; it is of no consequence."""
    rank, value = arguments if len(arguments) == 2 else (-1, *arguments)
    return rank, value
