"""Machines of NVIDIA's."""

import subprocess

from strata.msccl.topologies.topology import Topology

__all__ = ["dgx1", "dgx_a100", "nvlink_only"]

# NVLinks of a DGX-1 between two GPUs: two where the hybrid cube mesh doubles them.
_DGX1_DOUBLE = ((0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7))
_DGX1_SINGLE = ((0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6))


def dgx1():
    """A DGX-1: 8 V100, in two groups of four."""
    links = [[0] * 8 for _ in range(8)]
    for pairs, count in ((_DGX1_DOUBLE, 2), (_DGX1_SINGLE, 1)):
        for one, other in pairs:
            links[one][other] = links[other][one] = count
    return Topology("DGX1", links)


def dgx_a100():
    """A DGX A100: 8 GPUs with 12 NVLinks each to a switch."""
    return Topology("DGX_A100", [[12 * (dst != src) for src in range(8)] for dst in range(8)])


def nvlink_only(nvidia_smi_topo=None):
    """NVLinks as the text of `nvidia-smi topo -m` tells them, by default of this machine."""
    if nvidia_smi_topo is None:
        nvidia_smi_topo = subprocess.run(
            ["nvidia-smi", "topo", "-m"], check=True, stdout=subprocess.PIPE, universal_newlines=True
        ).stdout
    rows = []
    for row in nvidia_smi_topo.splitlines()[1:]:
        if not row.startswith("GPU"):
            break
        rows.append(row.split("\t")[1:])
    return Topology("NVLinkOnly", [[_nvlinks(cell) for cell in row[: len(rows)]] for row in rows])


def _nvlinks(cell):
    cell = cell.strip()
    return int(cell[2:]) if cell.startswith("NV") else 0
