"""Machines with AMD's GPUs."""

from strata.msccl.topologies.topology import Topology

__all__ = ["amd4", "amd8"]

# Of 8 GPUs, pairs of the same group have the wider link; GPU 0 is in the group of 2, 3 and 5.
_AMD8_WIDE = ((0, 2), (0, 3), (0, 5), (1, 4), (1, 6), (1, 7), (2, 3), (2, 5), (3, 5), (4, 6), (4, 7), (6, 7))


def amd4():
    """4 GPUs in a ring: 0, 1, 3, 2."""
    return Topology("AMD4", [[int(dst != src and dst + src != 3) for src in range(4)] for dst in range(4)])


def amd8():
    """8 GPUs with links of bandwidth 5 and 6."""
    links = [[5 * (dst != src) for src in range(8)] for dst in range(8)]
    for one, other in _AMD8_WIDE:
        links[one][other] = links[other][one] = 6
    return Topology("AMD8", links)
