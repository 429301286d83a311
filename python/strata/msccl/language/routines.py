"""Rings over a part of the ranks, for programs that are made of them."""

from strata.msccl.language import Buffer, chunk


def allgather_ring_inplace(gpus, gpu_offset=0, index_offset=0, ch=0):
    """Gathers among `gpus` ranks from `gpu_offset` on; their chunks stand in the output from `index_offset` on."""
    for position in range(gpus):
        at = chunk(gpu_offset + position, Buffer.input, 0)
        for hop in range(1, gpus):
            at = at.copy(gpu_offset + (position + hop) % gpus, Buffer.output, index_offset + position, ch=ch)


def allreduce_ring_inplace(gpus, gpu_offset=0, index_offset=0, ch=0):
    """Reduces `gpus` chunks of the input from `index_offset` on, among `gpus` ranks from `gpu_offset` on."""
    for position in range(gpus):
        index = index_offset + position
        at = chunk(gpu_offset + position, Buffer.input, index)
        for hop in range(1, gpus):
            at = chunk(gpu_offset + (position + hop) % gpus, Buffer.input, index).reduce(at, ch=ch)
        for hop in range(gpus - 1):
            at = at.copy(gpu_offset + (position + hop) % gpus, Buffer.input, index, ch=ch)
