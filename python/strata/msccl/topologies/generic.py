"""Topologies by their form, of any number of ranks."""

from strata.msccl.topologies.topology import Topology

__all__ = ["fully_connected", "hub_and_spoke", "line", "ring", "star"]


def _by(num_nodes, has_link):
    """Links of bandwidth 1 from `src` to `dst` where `has_link(dst, src)` says so."""
    return [[int(dst != src and has_link(dst, src)) for src in range(num_nodes)] for dst in range(num_nodes)]


def fully_connected(num_nodes):
    """Each rank has a link to each other one."""
    return Topology(f"FullyConnected(n={num_nodes})", _by(num_nodes, lambda dst, src: True))


def hub_and_spoke(num_nodes):
    """Each rank has a link to each other one, through one switch port in and one out."""
    switches = []
    for node in range(num_nodes):
        others = [other for other in range(num_nodes) if other != node]
        switches += [([node], others, 1, f"node_{node}_out"), (others, [node], 1, f"node_{node}_in")]
    return Topology(f"HubAndSpoke(n={num_nodes})", _by(num_nodes, lambda dst, src: True), switches)


def ring(num_nodes):
    """Each rank has links to the one before and the one after it, the last to the first."""
    beside = lambda dst, src: (dst - src) % num_nodes in (1, num_nodes - 1)  # noqa: E731
    return Topology(f"Ring(n={num_nodes})", _by(num_nodes, beside))


def line(num_nodes):
    """Each rank has links to the one before and the one after it."""
    return Topology(f"Line(n={num_nodes})", _by(num_nodes, lambda dst, src: abs(dst - src) == 1))


def star(num_nodes, non_blocking=True):
    """Rank 0 has links to all others, and they to it."""
    points = list(range(1, num_nodes))
    switches = [] if non_blocking else [([0], points, 1, "to_points"), (points, [0], 1, "from_points")]
    return Topology(f"Star(n={num_nodes})", _by(num_nodes, lambda dst, src: 0 in (dst, src)), switches)
