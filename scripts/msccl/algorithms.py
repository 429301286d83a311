"""The algorithms that MSCCLang's evaluation compares, as programs (Cowan et al., ASPLOS 2023, section 7)."""

from program import Program


def ring_order(nodes, gpus, turn):
    """All ranks node by node; each node's are turned, so that rings leave nodes through different NICs."""
    return [node * gpus + (local + turn) % gpus for node in range(nodes) for local in range(gpus)]


def ring(nodes, gpus, channels, instances, protocol="Simple"):
    """Ring all-reduce: a logical ring over several channels, `instances` times, each on its part of the message.

    With one channel and 24 instances it is NCCL's ring on eight A100 (section 7.1.1).
    """
    nranks = nodes * gpus
    program = Program("ring", "allreduce", nranks, nranks * instances, protocol, in_place=True)
    for hop in range(2 * nranks - 1):
        for instance in range(instances):
            order = ring_order(nodes, gpus, instance if nodes > 1 else 0)
            for chunk in range(nranks):
                at = (chunk + hop) % nranks
                channel = instance * channels + chunk % channels
                rank = order[at]
                block = program.block(rank, order[(at + 1) % nranks], order[at - 1], channel)
                last = 2 * nranks - 2
                kind = "s" if hop == 0 else "r" if hop == last else "rcs"
                if 0 < hop < nranks:
                    kind = "rrcs" if hop == nranks - 1 else "rrs"
                place = ("i", instance * nranks + chunk)
                program.step(rank, block, kind, place, place)
    return program


def half_ring(gpus, collective, instances, protocol="Simple"):
    """One half of the ring inside a node: `allgather` or `reducescatter`, `instances` times."""
    program = Program(collective, collective, gpus, gpus * instances, protocol)
    gather = collective == "allgather"
    for hop in range(gpus):
        for instance in range(instances):
            for chunk in range(gpus):
                # The chunk's way begins at its rank, or ends there.
                rank = (chunk + hop + (0 if gather else 1)) % gpus
                block = program.block(rank, (rank + 1) % gpus, (rank - 1) % gpus, instance)
                whole, part = chunk * instances + instance, instance
                if gather:
                    if hop == 0:
                        program.step(rank, block, "cpy", ("i", part), ("o", whole))
                    kind = "s" if hop == 0 else "r" if hop == gpus - 1 else "rcs"
                    program.step(rank, block, kind, ("i", part) if hop == 0 else ("o", whole), ("o", whole))
                else:
                    kind = "s" if hop == 0 else "rrc" if hop == gpus - 1 else "rrs"
                    program.step(rank, block, kind, ("i", whole), ("o", part))
    return program


def all_pairs(gpus, instances, protocol="LL"):
    """All-pairs all-reduce: each rank gathers its chunk of all others, adds them, and sends the sum to all (section 7.1.2)."""
    program = Program("all_pairs", "allreduce", gpus, gpus * instances, protocol, in_place=True)
    parts = [(instance, rank) for instance in range(instances) for rank in range(gpus)]
    for away in range(1, gpus):
        for instance, rank in parts:
            peer = (rank + away) % gpus
            own = ("i", instance * gpus + peer)
            program.step(rank, program.block(rank, peer, peer, instance), "s", own, own)
        for instance, rank in parts:
            peer = (rank - away) % gpus
            room = ("s", instance * gpus + peer)
            program.step(rank, program.block(rank, peer, peer, instance), "r", room, room)
    for instance, rank in parts:
        block = program.block(rank, (rank + 1) % gpus, (rank + 1) % gpus, instance)
        for away in range(1, gpus):
            program.step(
                rank, block, "re", ("s", instance * gpus + (rank + away) % gpus), ("i", instance * gpus + rank)
            )
    for away in range(1, gpus):
        for instance, rank in parts:
            peer = (rank + away) % gpus
            own = ("i", instance * gpus + rank)
            program.step(rank, program.block(rank, peer, peer, instance), "s", own, own)
        for instance, rank in parts:
            peer = (rank - away) % gpus
            own = ("i", instance * gpus + peer)
            program.step(rank, program.block(rank, peer, peer, instance), "r", own, own)
    return program


def hierarchical(nodes, gpus, instances, rails, protocol="Simple"):
    """Hierarchical all-reduce: reduce-scatter inside nodes, both halves between nodes, all-gather inside nodes (figure 3).

    The phases inside nodes run `instances` times beside each other; messages between nodes take `rails` channels in turns.
    """
    chunks = gpus * instances * nodes
    program = Program("hierarchical", "allreduce", nodes * gpus, chunks, protocol, in_place=True)
    parts = [(group, instance) for group in range(gpus) for instance in range(instances)]

    def inside(hop, reduces):
        for node in range(nodes):
            for group, instance in parts:
                local = (group + hop + (1 if reduces else 0)) % gpus
                base = node * gpus
                rank, to, back = base + local, base + (local + 1) % gpus, base + (local - 1) % gpus
                channel = rails + 2 * instance + (0 if reduces else 1)
                last = hop == gpus - 1
                kind = "s" if hop == 0 else ("rrc" if reduces else "r") if last else "rrs" if reduces else "rcs"
                place = ("i", (group * instances + instance) * nodes)
                program.step(rank, program.block(rank, to, back, channel), kind, place, place, nodes)

    def between(hop, reduces):
        for group, instance in parts:
            for part in range(nodes):
                node = (part + hop + (1 if reduces else 0)) % nodes
                rank = node * gpus + group
                to, back = (node + 1) % nodes * gpus + group, (node - 1) % nodes * gpus + group
                last = hop == nodes - 1
                kind = "s" if hop == 0 else ("rrc" if reduces else "r") if last else "rrs" if reduces else "rcs"
                place = ("i", (group * instances + instance) * nodes + part)
                program.step(rank, program.block(rank, to, back, instance % rails), kind, place, place)

    for hop in range(gpus):
        inside(hop, True)
    for hop in range(nodes):
        between(hop, True)
    for hop in range(nodes):
        between(hop, False)
    for hop in range(gpus):
        inside(hop, False)
    return program


def tree(nodes, gpus, channels, protocol="Simple"):
    """NCCL's tree on two nodes: in each a chain to the rank at its head, and the heads exchange; one tree a channel."""
    assert nodes == 2, "a tree of nodes is not needed here"
    program = Program("tree", "allreduce", nodes * gpus, channels, protocol, in_place=True)
    for channel in range(channels):
        place = ("i", channel)
        chains = [ring_order(nodes, gpus, channel)[node * gpus : (node + 1) * gpus] for node in range(nodes)]

        def do(rank, kind, to=-1, back=-1, place=place, channel=channel):
            program.step(rank, program.block(rank, to, back, channel), kind, place, place)

        for chain in chains:
            do(chain[-1], "s", to=chain[-2])
            for at in range(gpus - 2, 0, -1):
                do(chain[at], "rrcs", to=chain[at - 1], back=chain[at + 1])
            do(chain[0], "rrc", back=chain[1])
        root, other = chains[0][0], chains[1][0]
        do(other, "s", to=root)
        do(root, "rrc", back=other)
        do(root, "s", to=other)
        do(other, "r", back=root)
        for chain in chains:
            do(chain[0], "s", to=chain[1])
            for at in range(1, gpus - 1):
                do(chain[at], "rcs", to=chain[at + 1], back=chain[at - 1])
            do(chain[-1], "r", back=chain[-2])
    return program


def direct_all_to_all(nranks, at_once, protocol="Simple"):
    """All-to-all by point-to-point messages, as NCCL's: each rank has at most `at_once` peers in hand at a time."""
    program = Program("direct", "alltoall", nranks, nranks, protocol)
    for rank in range(nranks):
        program.step(rank, program.block(rank), "cpy", ("i", rank), ("o", rank))
    sends = {}
    for away in range(1, nranks):
        for rank in range(nranks):
            to, back = (rank + away) % nranks, (rank - away) % nranks
            block = program.block(rank, to, back)
            before = sends.get((rank, away - at_once))
            block.steps.append(("s", ("i", to), ("i", to), 1, before))
            block.steps.append(("r", ("o", back), ("o", back), 1, None))
            sends[rank, away] = (block.number, 1)
    return program


def two_step_all_to_all(nodes, gpus, protocol="Simple"):
    """Two-step all-to-all: to the rank of the own node on the target's rail, then all of a node's in one message (figure 9)."""
    nranks = nodes * gpus
    program = Program("two_step", "alltoall", nranks, nranks, protocol)
    for away in range(1, nodes + 1):
        for node in range(nodes):
            far = (node + away) % nodes
            for local in range(gpus):
                rank = node * gpus + local
                arrived = lambda source: ("o", node * gpus + source) if far == node else ("s", far * gpus + source)
                for turn in range(1, gpus):
                    peer = (local + turn) % gpus
                    block = program.block(rank, node * gpus + peer, node * gpus + peer)
                    program.step(rank, block, "s", ("i", far * gpus + peer))
                for turn in range(1, gpus):
                    peer = (local - turn) % gpus
                    block = program.block(rank, node * gpus + peer, node * gpus + peer)
                    program.step(rank, block, "r", dst=arrived(peer))
                program.step(rank, program.block(rank), "cpy", ("i", far * gpus + local), arrived(local))
        if away == nodes:
            break
        for node in range(nodes):
            far, back = (node + away) % nodes, (node - away) % nodes
            for local in range(gpus):
                rank = node * gpus + local
                block = program.block(rank, far * gpus + local, back * gpus + local)
                program.step(rank, block, "s", ("s", far * gpus), count=gpus)
                program.step(rank, block, "r", dst=("o", back * gpus), count=gpus)
    return program


NEXT = """# Each rank's output is the input of the rank before; the first has none before it.
[[output]]
ranks = "1-{last}"
rank_shift = -1
"""


def next_direct(nodes, gpus):
    """Each rank sends its whole buffer to the next, with one connection. And the contract of that collective."""
    nranks = nodes * gpus
    program = Program("next_direct", "custom", nranks, 1)
    for rank in range(nranks):
        block = program.block(rank, rank + 1 if rank + 1 < nranks else -1, rank - 1)
        if rank + 1 < nranks:
            program.step(rank, block, "s", ("i", 0))
        if rank:
            program.step(rank, block, "r", dst=("o", 0))
    return program, NEXT.format(last=nranks - 1)


def all_to_next(nodes, gpus, instances, protocol="Simple"):
    """AllToNext: from node to node all ranks of both carry a part each, over all NICs (figure 10). And its contract."""
    nranks = nodes * gpus
    program = Program("all_to_next", "custom", nranks, gpus * instances, protocol)
    parts = [(local, local * instances + instance, instance) for local in range(gpus) for instance in range(instances)]

    def message(rank, src, to, dst, channel, count=1):
        program.step(rank, program.block(rank, to, -1, channel), "s", src, count=count)
        program.step(to, program.block(to, -1, rank, channel), "r", dst=dst, count=count)

    for rank in range(nranks - 1):
        if (rank + 1) % gpus:
            for instance in range(instances):
                place = instance * gpus
                message(rank, ("i", place), rank + 1, ("o", place), instance, gpus)
            continue
        node, first = rank // gpus, rank + 1
        for local, chunk, instance in parts:
            carrier, target = node * gpus + local, first + local
            src, dst = ("i", chunk), ("o", chunk)
            if carrier != rank:
                # Channels of their own, beside those on which neighbours send their whole buffers.
                message(rank, src, carrier, ("s", instance), instances + instance)
                src = ("s", instance)
            if target == first:
                message(carrier, src, first, dst, instance)
                continue
            message(carrier, src, target, ("s", instances + instance), instance)
            message(target, ("s", instances + instance), first, dst, instances + instance)
    return program, NEXT.format(last=nranks - 1)
