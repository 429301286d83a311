"""AllToNext: each rank's input goes to the rank after it; the last has none after it.

A collective of one's own: `init_buffers` says what is there, `check` what has to be there in the end. Between nodes all
ranks of a node help, each with one chunk, so that all network cards are busy.

usage: all_to_next.py NODES RANKS_PER_NODE
"""

import sys

from strata.msccl.language import *
from strata.msccl.language.collectives import Collective
from strata.msccl.topologies import *

nodes, local = int(sys.argv[1]), int(sys.argv[2])
ranks = nodes * local


class AllToNext(Collective):
    """Each rank's output is the input of the rank before."""

    def init_buffers(self):
        return [
            {
                Buffer.input: [Chunk(rank, index, rank + 1, index) for index in range(self.chunk_factor)],
                Buffer.output: [None] * self.chunk_factor,
            }
            for rank in range(self.num_ranks)
        ]

    def check(self, prog):
        return all(
            prog.buffers[rank][Buffer.output][index] == Chunk(rank - 1, index)
            for rank in range(1, self.num_ranks)
            for index in range(self.chunk_factor)
        )


with MSCCLProgram("all_to_next", fully_connected(ranks), AllToNext(ranks, local, inplace=False), 1):
    for rank in range(ranks - 1):
        if rank % local < local - 1:
            chunk(rank, Buffer.input, 0, local).copy(rank + 1, Buffer.output, 0)
            continue
        first = rank + 1 - local
        for number in range(local):
            c = chunk(rank, Buffer.input, number)
            if first + number != rank:
                c = c.copy(first + number, "out")
            if number == 0:
                c.copy(rank + 1, Buffer.output, number)
            else:
                c.copy(rank + 1 + number, "in").copy(rank + 1, Buffer.output, number)
    Check()
    XML()
