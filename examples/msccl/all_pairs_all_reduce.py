"""All-reduce in two rounds: every rank reduces one part of the data, which all others send to it, and sends it to all.

With thread blocks by hand: one for each peer.

usage: all_pairs_all_reduce.py RANKS
"""

import sys

from strata.msccl.language import *
from strata.msccl.language.collectives import AllReduce
from strata.msccl.topologies import *

ranks = int(sys.argv[1])
options = {"protocol": "LL", "threadblock_policy": ThreadblockPolicy.manual, "interleaved_replication": False}

with MSCCLProgram("all_pairs_all_reduce", fully_connected(ranks), AllReduce(ranks, ranks, True), 2, **options):
    for owner in range(ranks):
        for rank in range(ranks):
            if rank != owner:
                chunk(rank, Buffer.input, owner).copy(owner, "parts", rank, sendtb=owner, recvtb=rank)
    for owner in range(ranks):
        for rank in range(ranks):
            if rank != owner:
                chunk(owner, Buffer.input, owner).reduce(chunk(owner, "parts", rank), sendtb=owner)
    for owner in range(ranks):
        whole = chunk(owner, Buffer.input, owner)
        for rank in range(ranks):
            if rank != owner:
                whole.copy(rank, Buffer.input, owner, sendtb=rank, recvtb=owner)
    Check()
    XML()
