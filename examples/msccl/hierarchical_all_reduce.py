"""All-reduce on nodes: reduce-scatter within each node, all-reduce across nodes of each part, all-gather within each node.

The rings within nodes run in two parallel parts each, since links there are wide.

usage: hierarchical_all_reduce.py NODES RANKS_PER_NODE
"""

import sys

from strata.msccl.language import *
from strata.msccl.language.collectives import AllReduce
from strata.msccl.topologies import *

nodes, local = int(sys.argv[1]), int(sys.argv[2])
topology = distributed_fully_connected(fully_connected(local), nodes, 1)


def part(rank, index):
    """All chunks of a part: one for each node."""
    return chunk(rank, Buffer.input, index * nodes, nodes)


def reduce_within(node):
    """Each part goes round the node and ends on the rank with its number."""
    for index in range(local):
        members = [node * local + (index + 1 + hop) % local for hop in range(local)]
        for sender, receiver in zip(members, members[1:]):
            part(receiver, index).reduce(part(sender, index))


def reduce_across(index):
    """The ranks with this number reduce their part, one chunk on each node, and copy the chunks to each other."""
    for owner in range(nodes):
        place = index * nodes + owner
        whole = chunk(owner * local + index, Buffer.input, place)
        for node in range(nodes):
            if node != owner:
                whole.reduce(chunk(node * local + index, Buffer.input, place))
        for node in range(nodes):
            if node != owner:
                whole.copy(node * local + index, Buffer.input, place)


def gather_within(node):
    """Each part goes round the node from the rank with its number."""
    for index in range(local):
        at = part(node * local + index, index)
        for hop in range(1, local):
            at = at.copy(node * local + (index + hop) % local)


with MSCCLProgram("hierarchical_all_reduce", topology, AllReduce(nodes * local, nodes * local, True), 1):
    with parallelize(2):
        for node in range(nodes):
            reduce_within(node)
    for index in range(local):
        reduce_across(index)
    with parallelize(2):
        for node in range(nodes):
            gather_within(node)
    Check()
    XML()
