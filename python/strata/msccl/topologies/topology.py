"""A topology: bandwidths of links between ranks, and of switches that links share."""


class Topology:
    """`links[dst][src]` is a link's bandwidth, 0 where there is none. A switch is (sources, destinations, bandwidth, name).

    A program may use all links that there are; bandwidths and switches are for those who read them.
    """

    def __init__(self, name, links, switches=()):
        for *_, bandwidth, switch in switches:
            if bandwidth <= 0:
                raise ValueError(f"switch {switch}: bandwidth {bandwidth} is not above 0")
        self.name = name
        self.links = links
        self.switches = list(switches)

    def link(self, src, dst):
        """The bandwidth from one rank to another."""
        return self.links[dst][src]

    def sources(self, dst):
        """Ranks with a link to this one."""
        return (src for src, bandwidth in enumerate(self.links[dst]) if bandwidth > 0)

    def destinations(self, src):
        """Ranks to which this one has a link."""
        return (dst for dst, row in enumerate(self.links) if row[src] > 0)

    def num_nodes(self):
        """How many ranks there are."""
        return len(self.links)

    def nodes(self):
        """All ranks."""
        return range(self.num_nodes())

    def bandwidth_constraints(self):
        """Links, then switches, each as (sources, destinations, bandwidth, name)."""
        for dst, row in enumerate(self.links):
            for src, bandwidth in enumerate(row):
                if bandwidth > 0:
                    yield [src], [dst], bandwidth, f"{src}→{dst}"
        yield from self.switches
