"""What ranks do with the process group for PyTorch before 2.14, which newer ones take as well."""

import like_gloo
import strata.torch
import torch.distributed as dist

# Newer ones ask a backend for batches of messages, which this group has none of; older ones do this.
if not strata.torch.OLD:
    dist.batch_isend_irecv = lambda ops: [op.op(op.tensor, op.peer, op.group) for op in ops]
strata.torch.OLD = True


def reductions(seed):
    like_gloo.reductions(seed)


def moves(seed):
    like_gloo.moves(seed)


def training():
    """DDP and FSDP2 learn the same, bit by bit."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))
    import torch
    import train

    dist.init_process_group("strata")
    assert type(dist.group.WORLD).__name__ == "StrataProcessGroup", type(dist.group.WORLD)
    rank, size = dist.get_rank(), dist.get_world_size()
    results = [way(rank, size) for way in (train.ddp, train.fsdp2)]
    assert results[0][0] == results[1][0], results
    for name, parameter in results[0][1].items():
        assert torch.equal(parameter, results[1][1][name]), name
    dist.destroy_process_group()
