"""Which algorithm and protocol NCCL 2.8 takes for an all-reduce, by the model of its tuning source (src/graph/tuning.cc).

MSCCLang was measured against that release. Times are in microseconds, rates in GB/s.
"""

PROTOCOLS = ["LL", "LL128", "Simple"]

BASE = {"ring": [3.6, 10.0, 8.4], "tree": [4.4, 4.4, 0.0]}
INSIDE = {"ring": [0.47, 1.9, 3.4], "tree": [0.52, 1.2, 28.0]}
NETWORK = {"ring": [2.7, 4.0, 9.6], "tree": [5.0, 8.5, 50.0]}
CHANNEL_LL128 = 16.7

# How far a tree falls short of the model, for powers of two from 64 bytes on.
TREE_FACTORS = [
    [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1],
    [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1],
    [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9],
]


def latency(algorithm, protocol, nodes, gpus):
    """What the model has beside the bytes."""
    inside = INSIDE[algorithm][protocol] * (1.8 if nodes > 1 and protocol == 0 else 1.0)
    network = NETWORK[algorithm][protocol]
    if algorithm == "ring":
        steps, between = 2 * (nodes * gpus - 1), 2 * (nodes - 1)
        return BASE[algorithm][protocol] + (steps - between) * inside + between * network
    levels = (nodes - 1).bit_length()
    return BASE[algorithm][protocol] + 2 * ((gpus - 1) * inside + levels * network)


def rate(algorithm, protocol, nodes, gpus, bus, channels, ampere):
    """Bytes of the message a second, from the rate of the bus."""
    if ampere:
        bus = min(bus, 235.0)
    if algorithm == "ring":
        if protocol == 0:
            bus /= 4
        elif protocol == 1:
            bus = min(bus * 0.92, CHANNEL_LL128 * channels)
        return bus * nodes * gpus / (2 * (nodes * gpus - 1))
    most = 130.0 if ampere and protocol == 1 else 110.0
    bus = min(bus * 0.9, most)
    if protocol == 0:
        bus /= 3.8
    elif protocol == 1:
        bus = min(bus * (7 / 9 if nodes == 1 else 0.915), CHANNEL_LL128 * channels * 7 / 9)
    return bus / 2


def predicted_us(algorithm, protocol, nbytes, nodes, gpus, bus, channels, ampere):
    """The time that NCCL's model gives."""
    gbps = rate(algorithm, protocol, nodes, gpus, bus, channels, ampere)
    beside = latency(algorithm, protocol, nodes, gpus)
    size = max(nbytes >> 6, 1).bit_length() - 1
    if algorithm == "tree" and size < len(TREE_FACTORS[protocol]):
        gbps *= TREE_FACTORS[protocol][size]
    if algorithm == "ring" and protocol == 2 and nodes > 1 and nbytes >= nodes * gpus / 16 * 65536:
        beside *= 1.9
    return beside + nbytes / gbps / 1e3


def choice(nbytes, nodes, gpus, bus, channels, ampere, algorithms=("ring", "tree")):
    """The algorithm and the protocol with the shortest predicted time."""
    ways = [(algorithm, protocol) for algorithm in algorithms for protocol in range(3)]
    algorithm, protocol = min(ways, key=lambda way: predicted_us(*way, nbytes, nodes, gpus, bus, channels, ampere))
    return algorithm, PROTOCOLS[protocol]
