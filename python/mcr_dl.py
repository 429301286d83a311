"""MCR-DL in Python: collectives and messages of which each call names the library that makes it.

    import mcr_dl

    mcr_dl.init(["nccl", "mpi"])
    h = mcr_dl.all_reduce("nccl", x, async_op=True)
    mcr_dl.all_to_all_single("mpi", z, y)
    h.wait()

The functions are Listing 1 of MCR-DL (Anthony et al., IPDPS 2023), with its names and its order of arguments, over libstrata.so.
Tensors are NumPy's, PyTorch's, or any with DLPack's protocol; they are contiguous. The ranks are those of torch.distributed
where that has been initialised, else those that a launcher has started (torchrun, strata launch, mpirun, srun).

A backend is a name (`CARRIERS` has all), or "auto", where the tuning table chooses; or an algorithm and a carrier, as
"ring@mpi". Each backend has one order: all ranks make its calls in that one. Between backends there is none.
"""

from strata.mcr_dl import CARRIERS, McrError, McrTimeout, ReduceOp, Work, World

__all__ = ["CARRIERS", "McrError", "McrTimeout", "ReduceOp", "Work"]

_world = World()

get_backends = _world.get_backends
init = _world.init
finalize = _world.finalize
synchronize = _world.synchronize
get_size = _world.get_size
get_rank = _world.get_rank
send = _world.send
recv = _world.recv
all_to_all_single = _world.all_to_all_single
all_to_all = _world.all_to_all
all_reduce = _world.all_reduce
all_gather = _world.all_gather
gather = _world.gather
scatter = _world.scatter
reduce = _world.reduce
reduce_scatter = _world.reduce_scatter
bcast = _world.bcast
gatherv = _world.gatherv
scatterv = _world.scatterv
all_to_allv = _world.all_to_allv
all_gatherv = _world.all_gatherv

__all__ += [
    "get_backends",
    "init",
    "finalize",
    "synchronize",
    "get_size",
    "get_rank",
    "send",
    "recv",
    "all_to_all_single",
    "all_to_all",
    "all_reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce",
    "reduce_scatter",
    "bcast",
    "gatherv",
    "scatterv",
    "all_to_allv",
    "all_gatherv",
]
