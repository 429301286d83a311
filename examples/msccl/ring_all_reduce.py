"""All-reduce around a ring: each chunk goes round once to be reduced, and once more to be copied.

Chunk i ends its first round on rank i - 1, so all links carry the same load. Chunks alternate between channels.

usage: ring_all_reduce.py RANKS [CHANNELS]
"""

import sys

from strata.msccl.language import *
from strata.msccl.language.collectives import AllReduce
from strata.msccl.topologies import *

ranks = int(sys.argv[1])
channels = int(sys.argv[2]) if len(sys.argv) > 2 else 1

with MSCCLProgram("ring_all_reduce", ring(ranks), AllReduce(ranks, ranks, inplace=True), instances=1):
    for index in range(ranks):
        channel = index % channels
        partial = chunk(index, Buffer.input, index)
        for hop in range(1, ranks):
            partial = chunk((index + hop) % ranks, Buffer.input, index).reduce(partial, ch=channel)
        whole = partial
        for hop in range(ranks, 2 * ranks - 1):
            whole = whole.copy((index + hop) % ranks, Buffer.input, index, ch=channel)
    Check()
    XML()
