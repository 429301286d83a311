"""The algorithms that MSCCLang's evaluation compares (Cowan et al., ASPLOS 2023, section 7), in the language of msccl-tools.

Channels are written down where the paper says them or where messages shall not share a connection, thread blocks where one
sends to a peer and receives from one without a message that goes on; the rest is the compiler's choice. Each function returns
the trace of its program.
"""

from strata.msccl.language import Buffer, Chunk, MSCCLProgram, ThreadblockPolicy, chunk
from strata.msccl.language.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from strata.msccl.topologies import fully_connected


def program(name, collective, protocol, policy=ThreadblockPolicy.auto):
    return MSCCLProgram(name, fully_connected(collective.num_ranks), collective, 1, protocol, policy)


def ring_order(nodes, gpus, turn):
    """All ranks node by node; each node's are turned, so that rings leave nodes through different NICs."""
    return [node * gpus + (local + turn) % gpus for node in range(nodes) for local in range(gpus)]


def reduce_along(ranks, index, size=1, ch=-1):
    """Reduces chunks from the first of the ranks to the last; what the last has then."""
    at = chunk(ranks[0], Buffer.input, index, size)
    for rank in ranks[1:]:
        at = chunk(rank, Buffer.input, index, size).reduce(at, ch=ch)
    return at


def copy_along(at, ranks, ch=-1):
    """Copies chunks from rank to rank, to the place where they are."""
    for rank in ranks:
        at = at.copy(rank, ch=ch)


def ring(nodes, gpus, channels, instances, protocol="Simple"):
    """Ring all-reduce: a logical ring over several channels, `instances` times, each on its part of the message.

    With one channel and 24 instances it is NCCL's ring on eight A100 (section 7.1.1).
    """
    nranks = nodes * gpus
    with program("ring", AllReduce(nranks, nranks * instances, inplace=True), protocol) as made:
        for instance in range(instances):
            order = ring_order(nodes, gpus, instance if nodes > 1 else 0)
            for part in range(nranks):
                way = order[part:] + order[:part]
                channel = instance * channels + part % channels
                whole = reduce_along(way, instance * nranks + part, ch=channel)
                copy_along(whole, way[:-1], ch=channel)
    return made.trace()


def reduce_scatter(gpus, instances, protocol="Simple"):
    """The first half of the ring inside a node, `instances` times."""
    with program("reduce_scatter", ReduceScatter(gpus, instances, inplace=True), protocol) as made:
        for instance in range(instances):
            for rank in range(gpus):
                way = [(rank + 1 + hop) % gpus for hop in range(gpus)]
                reduce_along(way, rank * instances + instance, ch=instance)
    return made.trace()


def all_gather(gpus, instances, protocol="Simple"):
    """The second half of the ring inside a node, `instances` times."""
    with program("all_gather", AllGather(gpus, instances, inplace=False), protocol) as made:
        for instance in range(instances):
            for rank in range(gpus):
                index = rank * instances + instance
                chunk(rank, Buffer.input, instance).copy(rank, Buffer.output, index)
                first, *rest = [(rank + hop) % gpus for hop in range(1, gpus)]
                at = chunk(rank, Buffer.input, instance).copy(first, Buffer.output, index, ch=instance)
                copy_along(at, rest, ch=instance)
    return made.trace()


def all_pairs(gpus, instances, protocol="LL"):
    """All-pairs all-reduce: each rank gathers its chunk of all others, adds them, and sends the sum to all (section 7.1.2)."""
    parts = [(instance, rank) for instance in range(instances) for rank in range(gpus)]

    def with_peers(instance, rank, peer):
        """A thread block for each peer."""
        return {"sendtb": instance * gpus + peer, "recvtb": instance * gpus + rank, "ch": instance}

    collective = AllReduce(gpus, gpus * instances, inplace=True)
    with program("all_pairs", collective, protocol, ThreadblockPolicy.manual) as made:
        for away in range(1, gpus):
            for instance, rank in parts:
                peer = (rank + away) % gpus
                theirs = chunk(rank, Buffer.input, instance * gpus + peer)
                theirs.copy(peer, "gathered", instance * gpus + rank, **with_peers(instance, rank, peer))
        for instance, rank in parts:
            own = chunk(rank, Buffer.input, instance * gpus + rank)
            for away in range(1, gpus):
                theirs = chunk(rank, "gathered", instance * gpus + (rank + away) % gpus)
                own = own.reduce(theirs, sendtb=instance * gpus + (rank + 1) % gpus)
        for away in range(1, gpus):
            for instance, rank in parts:
                peer = (rank + away) % gpus
                chunk(rank, Buffer.input, instance * gpus + rank).copy(peer, **with_peers(instance, rank, peer))
    return made.trace()


def hierarchical(nodes, gpus, instances, rails, protocol="Simple"):
    """Hierarchical all-reduce: reduce-scatter inside nodes, both halves between nodes, all-gather inside nodes (figure 3).

    The phases inside nodes run `instances` times beside each other; messages between nodes take `rails` channels in turns.
    """
    parts = [(group, instance, (group * instances + instance) * nodes) for group in range(gpus) for instance in range(instances)]
    collective = AllReduce(nodes * gpus, gpus * instances * nodes, inplace=True)
    with program("hierarchical", collective, protocol) as made:
        for base in range(0, nodes * gpus, gpus):
            for group, instance, place in parts:
                way = [base + (group + 1 + hop) % gpus for hop in range(gpus)]
                reduce_along(way, place, nodes, ch=rails + 2 * instance)
        for group, instance, place in parts:
            for part in range(nodes):
                way = [(part + 1 + hop) % nodes * gpus + group for hop in range(nodes)]
                whole = reduce_along(way, place + part, ch=instance % rails)
                copy_along(whole, way[:-1], ch=instance % rails)
        for base in range(0, nodes * gpus, gpus):
            for group, instance, place in parts:
                whole = chunk(base + group, Buffer.input, place, nodes)
                copy_along(whole, [base + (group + hop) % gpus for hop in range(1, gpus)], ch=rails + 2 * instance + 1)
    return made.trace()


def tree(nodes, gpus, channels, protocol="Simple"):
    """NCCL's tree on two nodes: in each a chain to the rank at its head, and the heads exchange; one tree a channel."""
    assert nodes == 2, "a tree of nodes is not needed here"
    with program("tree", AllReduce(nodes * gpus, channels, inplace=True), protocol) as made:
        for channel in range(channels):
            chains = [ring_order(nodes, gpus, channel)[node * gpus : (node + 1) * gpus] for node in range(nodes)]
            root, other = (reduce_along(chain[::-1], channel, ch=channel) for chain in chains)
            other = root.reduce(other, ch=channel).copy(chains[1][0], ch=channel)
            for head, chain in ((root, chains[0]), (other, chains[1])):
                copy_along(head, chain[1:], ch=channel)
    return made.trace()


def two_step_all_to_all(nodes, gpus, protocol="Simple"):
    """Two-step all-to-all: to the rank of the own node on the target's rail, then all of a node's in one message (figure 9)."""
    collective = AllToAll(nodes * gpus, 1, inplace=False)
    with program("two_step", collective, protocol, ThreadblockPolicy.manual) as made:
        for away in range(1, nodes + 1):
            for node in range(nodes):
                far, base = (node + away) % nodes, node * gpus
                for turn in range(gpus):
                    for local in range(gpus):
                        to = (local + turn) % gpus
                        own = chunk(base + local, Buffer.input, far * gpus + to)
                        place = (Buffer.output, base + local) if far == node else ("gathered", far * gpus + local)
                        # A thread block for each peer of the node, and one for each distance between nodes.
                        own.copy(base + to, *place, sendtb=to, recvtb=local)
                for local in range(gpus if far != node else 0):
                    all_of_node = chunk(base + local, "gathered", far * gpus, gpus)
                    between = gpus + away
                    all_of_node.copy(far * gpus + local, Buffer.output, base, sendtb=between, recvtb=between)
    return made.trace()


class AllToNext(Collective):
    """Each rank's output is the input of the rank before; the first has none before it."""

    def init_buffers(self):
        chunks = range(self.chunk_factor)
        return [
            {
                Buffer.input: [Chunk(rank, index, rank + 1, index) for index in chunks],
                Buffer.output: [None for _ in chunks],
            }
            for rank in range(self.num_ranks)
        ]

    def check(self, prog):
        return all(
            prog.buffers[rank][Buffer.output][index] == Chunk(rank - 1, index)
            for rank in range(1, self.num_ranks)
            for index in range(self.chunk_factor)
        )


def next_direct(nodes, gpus):
    """Each rank sends its whole buffer to the next, with one connection."""
    nranks = nodes * gpus
    with program("next_direct", AllToNext(nranks, 1, inplace=False), "Simple", ThreadblockPolicy.manual) as made:
        for rank in range(nranks - 1):
            chunk(rank, Buffer.input, 0).copy(rank + 1, Buffer.output, 0, sendtb=0, recvtb=0)
    return made.trace()


def all_to_next(nodes, gpus, instances, protocol="Simple"):
    """AllToNext: from node to node all ranks of both carry a part each, over all NICs (figure 10).

    What goes to a carrier and from one has channels of its own, beside those on which neighbours send their whole buffers.
    """
    nranks = nodes * gpus
    parts = [(local, local * instances + instance, instance) for local in range(gpus) for instance in range(instances)]
    with program("all_to_next", AllToNext(nranks, gpus * instances, inplace=False), protocol) as made:
        for rank in range(nranks - 1):
            if (rank + 1) % gpus:
                for instance in range(instances):
                    place = instance * gpus
                    chunk(rank, Buffer.input, place, gpus).copy(rank + 1, Buffer.output, place, ch=instance)
                continue
            node, first = rank // gpus, rank + 1
            for local, index, instance in parts:
                carrier, target = node * gpus + local, first + local
                at = chunk(rank, Buffer.input, index)
                if carrier != rank:
                    at = at.copy(carrier, "out", instance, ch=instances + instance)
                if target == first:
                    at.copy(first, Buffer.output, index, ch=instance)
                    continue
                at = at.copy(target, "in", instance, ch=instance)
                at.copy(first, Buffer.output, index, ch=instances + instance)
    return made.trace()


def direct_all_to_all(nranks, at_once, protocol="Simple"):
    """All-to-all by point-to-point messages, as NCCL's: each rank has at most `at_once` peers in hand at a time.

    In XML: that a message waits until another one is received, whose data it has nothing to do with, cannot be said in the
    language.
    """
    head = f'<algo name="direct" proto="{protocol}" nchannels="1" nchunksperloop="{nranks}" ngpus="{nranks}"'
    lines = [f'{head} coll="alltoall" inplace="0" outofplace="1" minBytes="0" maxBytes="0">']

    def step(number, kind, src, dst, after=None, is_awaited=False):
        dep, deps = after or (-1, -1)
        lines.append(
            f'   <step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1]}" dstbuf="{dst[0]}" dstoff="{dst[1]}" '
            f'cnt="1" depid="{dep}" deps="{deps}" hasdep="{int(is_awaited)}"/>'
        )

    for rank in range(nranks):
        lines.append(f' <gpu id="{rank}" i_chunks="{nranks}" o_chunks="{nranks}" s_chunks="0">')
        lines.append('  <tb id="0" send="-1" recv="-1" chan="0">')
        step(0, "cpy", ("i", rank), ("o", rank))
        lines.append("  </tb>")
        for away in range(1, nranks):
            to, back = (rank + away) % nranks, (rank - away) % nranks
            lines.append(f'  <tb id="{away}" send="{to}" recv="{back}" chan="0">')
            step(0, "s", ("i", to), ("i", to), (away - at_once, 1) if away > at_once else None)
            step(1, "r", ("o", back), ("o", back), is_awaited=away + at_once < nranks)
            lines.append("  </tb>")
        lines.append(" </gpu>")
    return "\n".join([*lines, "</algo>"]) + "\n"
