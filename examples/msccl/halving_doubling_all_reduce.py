"""All-reduce by recursive halving and doubling, for a power of two of ranks.

Pairs of ranks exchange halves of what they both still reduce, then quarters, and so on; then all of it backwards.

usage: halving_doubling_all_reduce.py RANKS
"""

import sys

from strata.msccl.language import *
from strata.msccl.language.collectives import AllReduce
from strata.msccl.topologies import *

ranks = int(sys.argv[1])


def owned(rank, distance):
    """First chunk and number of the chunks that a rank reduces in the round with partners at this distance."""
    return rank // distance * distance, distance


with MSCCLProgram("halving_doubling", fully_connected(ranks), AllReduce(ranks, ranks, True), 1):
    distance = ranks // 2
    while distance:
        for rank in range(ranks):
            first, count = owned(rank, distance)
            chunk(rank, Buffer.input, first, count).reduce(chunk(rank ^ distance, Buffer.input, first, count))
        distance //= 2
    distance = 1
    while distance < ranks:
        for rank in range(ranks):
            first, count = owned(rank, distance)
            chunk(rank, Buffer.input, first, count).copy(rank ^ distance)
        distance *= 2
    Check()
    XML()
