"""Several nodes of one topology each."""

from strata.msccl.topologies.topology import Topology

__all__ = ["distributed_fully_connected", "distributed_hub_and_spoke"]


def _copies(local, num_copies, remote_bw):
    """Links and switches of the nodes, and links of bandwidth `remote_bw` between ranks of different nodes."""
    size = local.num_nodes()
    ranks = range(size * num_copies)
    links = [
        [local.links[dst % size][src % size] if dst // size == src // size else remote_bw for src in ranks] for dst in ranks
    ]
    switches = [
        ([rank + copy * size for rank in srcs], [rank + copy * size for rank in dsts], bandwidth, f"copy_{copy}_{name}_local")
        for srcs, dsts, bandwidth, name in local.switches
        for copy in range(num_copies)
    ]
    return links, switches


def distributed_fully_connected(local_topology, num_copies, remote_bw):
    """Nodes whose ranks all have links to all ranks of the other nodes."""
    links, switches = _copies(local_topology, num_copies, remote_bw)
    name = f"DistributedFullyConnected(local={local_topology.name},copies={num_copies},bw={remote_bw})"
    return Topology(name, links, switches)


def distributed_hub_and_spoke(local_topology, num_copies, remote_bw):
    """The same, where the ranks of a node share one way out and one way in."""
    links, switches = _copies(local_topology, num_copies, remote_bw)
    size = local_topology.num_nodes()
    for copy in range(num_copies):
        inside = list(range(copy * size, (copy + 1) * size))
        outside = [rank for rank in range(size * num_copies) if rank // size != copy]
        switches.append((inside, outside, remote_bw, f"copy_{copy}_out_remote"))
        switches.append((outside, inside, remote_bw, f"copy_{copy}_in_remote"))
    name = f"DistributedHubAndSpoke(local={local_topology.name},copies={num_copies},bw={remote_bw})"
    return Topology(name, links, switches)
