"""What a program has to do: which chunks each rank's buffers hold at first, and which in the end."""

from strata.msccl.language.buffer import BufferSlice
from strata.msccl.language.chunk import Chunk, ReduceChunk
from strata.msccl.language.ir import Buffer, ThreadblockPolicy
from strata.msccl.language._program import MSCCLProgram, Ref

__all__ = [
    "AllGather", "AllReduce", "AllToAll", "Buffer", "BufferSlice", "Chunk", "Collective", "MSCCLProgram", "ReduceChunk",
    "ReduceScatter", "Ref", "ThreadblockPolicy",
]  # fmt: skip


class Collective:
    """A collective of `chunk_factor` chunks. One of your own is a class with `init_buffers` and `check`.

    `init_buffers` returns for each rank a dict of `Buffer.input` and `Buffer.output`, each a list with a `Chunk` or None in
    each place. `check(prog)` looks at `prog.buffers[rank][Buffer.output]` and returns whether all of it is right. What it
    looks at becomes the contract of the compiled program.
    """

    def __init__(self, num_ranks, chunk_factor, inplace):
        self.num_ranks = num_ranks
        self.chunk_factor = chunk_factor
        self.inplace = inplace
        self.name = "custom"

    def init_buffers(self):
        """The chunks in each rank's buffers before the program runs."""
        raise NotImplementedError(f"{type(self).__name__} has no init_buffers()")

    def check(self, prog):
        """Whether the buffers hold what they should after the program has run."""
        raise NotImplementedError(f"{type(self).__name__} has no check()")

    def get_buffer_index(self, rank, buffer, index):
        """The place where a chunk really is: in place, one buffer is a part of the other."""
        return buffer, index

    def lengths(self):
        """Chunks of input and output; None where those of `init_buffers` count."""
        return None


class _Named(Collective):
    """A collective that the library has, too."""

    _title = ""

    def __init__(self, num_ranks, chunk_factor, inplace):
        super().__init__(num_ranks, chunk_factor, inplace)
        self.name = self._title

    def _blocks(self):
        """Blocks of input and output, each of `chunk_factor` chunks."""
        raise NotImplementedError

    def _start(self, rank, index):
        """The chunk in this place of the input, with where it belongs."""
        raise NotImplementedError

    def _end(self, rank, index):
        """The chunk that belongs in this place of the output."""
        raise NotImplementedError

    def _sum(self, index):
        chunks = [Chunk(rank, index) for rank in range(self.num_ranks)]
        return ReduceChunk(-1, chunks) if len(chunks) > 1 else chunks[0]

    def lengths(self):
        blocks_in, blocks_out = self._blocks()
        return {Buffer.input: blocks_in * self.chunk_factor, Buffer.output: blocks_out * self.chunk_factor}

    def init_buffers(self):
        made, lengths = [], self.lengths()
        for rank in range(self.num_ranks):
            given = [self._start(rank, index) for index in range(lengths[Buffer.input])]
            if not self.inplace:
                made.append({Buffer.input: given, Buffer.output: [None] * lengths[Buffer.output]})
                continue
            shared = [None] * max(lengths.values())
            _, offset = self.get_buffer_index(rank, Buffer.input, 0)
            shared[offset : offset + len(given)] = given
            held, _ = self.get_buffer_index(rank, Buffer.output, 0)
            whole = len(given) == len(shared) == lengths[Buffer.output]
            made.append({Buffer.input: shared, Buffer.output: shared} if whole else {held: shared})
        return made

    def check(self, prog):
        correct = True
        for rank in range(self.num_ranks):
            for index in range(self.lengths()[Buffer.output]):
                buffer, place = self.get_buffer_index(rank, Buffer.output, index)
                found, wanted = prog.buffers[rank][buffer][place], self._end(rank, index)
                if found != wanted:
                    print(f"rank {rank}, output chunk {index}: holds {found}, should hold {wanted}")
                    correct = False
        return correct


class AllReduce(_Named):
    """Every rank gets the reduction of all inputs. In place: the output is the input."""

    _title = "allreduce"

    def _blocks(self):
        return 1, 1

    def _start(self, rank, index):
        return Chunk(rank, index, -1, index)

    def _end(self, rank, index):
        return self._sum(index)

    def get_buffer_index(self, rank, buffer, index):
        if self.inplace and buffer is Buffer.output:
            return Buffer.input, index
        return buffer, index


class AllGather(_Named):
    """Every rank gets every rank's input. In place: the input is the rank's block of the output."""

    _title = "allgather"

    def _blocks(self):
        return 1, self.num_ranks

    def _start(self, rank, index):
        return Chunk(rank, index, -1, rank * self.chunk_factor + index)

    def _end(self, rank, index):
        return Chunk(index // self.chunk_factor, index % self.chunk_factor)

    def get_buffer_index(self, rank, buffer, index):
        if self.inplace and buffer is Buffer.input:
            return Buffer.output, index + rank * self.chunk_factor
        return buffer, index


class ReduceScatter(_Named):
    """Each rank gets its block of the reduction of all inputs. In place: the output is the rank's block of the input."""

    _title = "reduce_scatter"

    def _blocks(self):
        return self.num_ranks, 1

    def _start(self, rank, index):
        return Chunk(rank, index, index // self.chunk_factor, index % self.chunk_factor)

    def _end(self, rank, index):
        return self._sum(rank * self.chunk_factor + index)

    def get_buffer_index(self, rank, buffer, index):
        if self.inplace and buffer is Buffer.output:
            return Buffer.input, index + rank * self.chunk_factor
        return buffer, index


class AllToAll(_Named):
    """Each rank gets its block of every rank's input. In place: the output is the input."""

    _title = "alltoall"

    def _blocks(self):
        return self.num_ranks, self.num_ranks

    def _start(self, rank, index):
        block, offset = divmod(index, self.chunk_factor)
        return Chunk(rank, index, block, offset + rank * self.chunk_factor)

    def _end(self, rank, index):
        block, offset = divmod(index, self.chunk_factor)
        return Chunk(block, offset + rank * self.chunk_factor)

    def get_buffer_index(self, rank, buffer, index):
        if self.inplace and buffer is Buffer.output:
            return Buffer.input, index
        return buffer, index
