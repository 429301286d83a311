"""All-to-all on nodes: what a node has for a rank elsewhere is collected first, and crosses the network in one message.

Collected are the chunks for a rank on the rank of the same number on their own node.

usage: two_step_all_to_all.py NODES RANKS_PER_NODE
"""

import sys

from strata.msccl.language import *
from strata.msccl.language.collectives import AllToAll
from strata.msccl.topologies import *

nodes, local = int(sys.argv[1]), int(sys.argv[2])
ranks = nodes * local

with MSCCLProgram("two_step_all_to_all", fully_connected(ranks), AllToAll(ranks, 1, inplace=False), 1):
    for rank in range(ranks):
        node = rank // local
        for target in range(ranks):
            c = chunk(rank, Buffer.input, target)
            if target // local == node:
                c.copy(target, Buffer.output, rank)
            else:
                c.copy(node * local + target % local, f"for node {target // local}", rank % local)
    for rank in range(ranks):
        node, number = divmod(rank, local)
        for other in range(nodes):
            if other != node:
                first, *rest = chunk(rank, f"for node {other}", 0, local).split(local)
                for c in rest:
                    first = first.group(c)
                first.copy(other * local + number, Buffer.output, node * local)
    Check()
    XML()
