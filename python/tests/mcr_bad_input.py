"""What each rank of the tests of mcr_dl does: wrong input, calls that differ, ranks that die."""

import os
import time

import mcr_dl
import numpy as np
import torch
from mcr_calls import begin
from mcr_tensors import Plain


def raises(kind, words, call):
    """Fails unless the call raises an exception of this kind whose text has all these words."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"the message lacks {missing}: {error}"
        return
    raise AssertionError(f"no exception, where one with {words} was due")


def different_names():
    """Ranks that name other backends, or name them in another order, are told at once, and may go on."""
    rank = int(os.environ["RANK"])
    for names in (["nccl", "gloo"], ["gloo", "nccl"]), (["nccl"], ["nccl", "gloo"]):
        raises(ValueError, ["rank 0", "rank 1", "order"], lambda: mcr_dl.init(names[rank % 2], timeout=20))
        mcr_dl.finalize()


def names_and_arguments():
    raises(ValueError, ["'ncll'", "did you mean 'nccl'?", "mv2-gdr"], lambda: mcr_dl.init(["nccl", "ncll"]))
    raises(ValueError, ["there is no backend 'quux'", "nccl"], lambda: mcr_dl.init("quux"))
    raises(TypeError, ["list of names", "3"], lambda: mcr_dl.init(3))
    for wrong, kind in (("x", TypeError), (-1, ValueError), (float("nan"), ValueError)):
        raises(kind, ["timeout", f"{wrong!r}"], lambda: mcr_dl.init("nccl", timeout=wrong))
    raises(mcr_dl.McrError, ["'nccl'", "init"], lambda: mcr_dl.all_reduce("nccl", np.ones(3)))
    rank, size = begin()
    tensor = np.ones(6 * size)
    raises(ValueError, ["'gluo'", "did you mean 'gloo'?"], lambda: mcr_dl.all_reduce("gluo", tensor))
    raises(ValueError, ["'mpi'", "has not been named to mcr_dl.init"], lambda: mcr_dl.all_reduce("mpi", tensor))
    raises(TypeError, ["by its name", "['nccl']"], lambda: mcr_dl.bcast(["nccl"], tensor))
    raises(TypeError, ["by its name"], lambda: mcr_dl.all_reduce(["nccl"], tensor))
    raises(mcr_dl.McrError, ["rong"], lambda: mcr_dl.all_reduce("rong@tcp", tensor))
    if size > 1:
        raises(mcr_dl.McrError, ["tpc", "tcp"], lambda: mcr_dl.all_reduce("ring@tpc", tensor))
        raises(ValueError, ["'@tcp'", "messages"], lambda: mcr_dl.send("@tcp", tensor, (rank + 1) % size))
    raises(TypeError, ["no operation", "SUM"], lambda: mcr_dl.all_reduce("nccl", tensor, 17))
    raises(TypeError, ["no operation"], lambda: mcr_dl.all_reduce("nccl", tensor, "sum"))
    raises(TypeError, ["no operation"], lambda: mcr_dl.all_reduce("nccl", tensor, []))
    for root in (-1, size, 1.0, None, True):
        raises(ValueError, ["root", f"{root!r}"], lambda: mcr_dl.bcast("nccl", tensor, root))
        raises(ValueError, ["root"], lambda: mcr_dl.gatherv("nccl", tensor, root, [1] * size))
    raises(ValueError, ["root"], lambda: mcr_dl.reduce_scatter("nccl", tensor, size))
    for peer in (-1, size, rank, None):
        raises(ValueError, [f"{peer!r}", "no other rank"], lambda: mcr_dl.send("nccl", tensor, peer))
    mcr_dl.all_reduce("nccl", tensor)
    assert tensor.tolist() == [size] * (6 * size), "the backend goes on"
    mcr_dl.finalize()


def tensors():
    rank, size = begin()
    for strided in (np.ones((4, 6)).T, np.ones(10)[::2], torch.ones(4, 6).t(), torch.ones(10)[::2], Plain(np.ones((4, 6)).T)):
        raises(ValueError, ["output", "not contiguous"], lambda: mcr_dl.all_reduce("nccl", strided))
        raises(ValueError, ["not contiguous"], lambda: mcr_dl.bcast("nccl", strided, async_op=True))
    for wrong in (None, 3.0, [1.0, 2.0], "text"):
        raises(TypeError, ["output", "must be a tensor"], lambda: mcr_dl.all_reduce("nccl", wrong))
    raises(TypeError, ["Python's objects"], lambda: mcr_dl.bcast("nccl", np.array([None])))
    raises(TypeError, ["sparse"], lambda: mcr_dl.all_reduce("nccl", torch.eye(3).to_sparse()))
    raises(ValueError, ["conj"], lambda: mcr_dl.all_reduce("nccl", torch.ones(3, dtype=torch.complex64).conj()))
    raises(TypeError, ["meta"], lambda: mcr_dl.all_reduce("nccl", torch.ones(3, device="meta")))
    frozen = np.ones(4)
    frozen.flags.writeable = False
    raises(ValueError, ["cannot be written to"], lambda: mcr_dl.all_reduce("nccl", frozen))
    if rank == 0:
        # What is only read need not be writable.
        mcr_dl.bcast("nccl", frozen)
    else:
        mcr_dl.bcast("nccl", np.zeros(4))
    foreign = np.ones(4, ">f8")
    raises(TypeError, ["foreign byte order", "cannot be reduced"], lambda: mcr_dl.all_reduce("nccl", foreign))
    mcr_dl.bcast("nccl", foreign)
    assert foreign.tolist() == [1] * 4
    raises(TypeError, ["float32 has no BAND"], lambda: mcr_dl.all_reduce("nccl", torch.ones(3), mcr_dl.ReduceOp.BAND))
    raises(TypeError, ["bool has no AVG"], lambda: mcr_dl.all_reduce("nccl", np.ones(3, bool), mcr_dl.ReduceOp.AVG))
    pairs = np.ones(3, complex)
    raises(TypeError, ["complex128 has no MAX"], lambda: mcr_dl.reduce("nccl", pairs, 0, mcr_dl.ReduceOp.MAX))
    raises(TypeError, ["datetime64", "cannot be reduced"], lambda: mcr_dl.all_reduce("nccl", np.zeros(3, "M8[s]")))
    mcr_dl.finalize()


def sizes():
    rank, size = begin()
    ones = np.ones
    block = 4
    raises(ValueError, ["input has 4", f"must have {4 * size}", "and has 5"], lambda: mcr_dl.all_gather("nccl", ones(5), ones(4)))
    raises(TypeError, ["input is float32", "output is float64"], lambda: mcr_dl.all_gather("nccl", ones(4 * size), ones(4, np.float32)))
    if size > 1:
        odd = ones(4 * size + 1)
        raises(ValueError, ["no equal blocks", f"{size} ranks"], lambda: mcr_dl.all_to_all_single("nccl", odd, odd.copy()))
        raises(ValueError, ["no equal blocks"], lambda: mcr_dl.reduce_scatter("nccl", odd))
        raises(mcr_dl.McrError, ["no in-place form"], lambda: mcr_dl.all_to_all_single("nccl", tensor := ones(size), tensor))
    raises(ValueError, ["output has"], lambda: mcr_dl.all_to_all_single("nccl", ones(2 * size), ones(3 * size)))
    raises(ValueError, ["input", "output"], lambda: mcr_dl.reduce_scatter("nccl", ones(3), input=ones(4 * size)))
    raises(ValueError, [f"list of {size}"], lambda: mcr_dl.all_to_all("nccl", [ones(1)] * (size + 1), [ones(1)] * size))
    raises(ValueError, [f"list of {size}"], lambda: mcr_dl.all_to_all("nccl", [ones(1)] * size, ones(size)))
    raises(TypeError, ["input[0] is float64"], lambda: mcr_dl.all_to_all("nccl", [ones(1, int)] * size, [ones(1)] * size))
    if rank == 0:
        raises(ValueError, ["output"], lambda: mcr_dl.gather("nccl", ones(3), 0, input=ones(4)))
        raises(ValueError, ["input"], lambda: mcr_dl.scatter("nccl", ones(3), 0, input=ones(4)))
        raises(TypeError, ["output", "must be a tensor"], lambda: mcr_dl.gather("nccl", None, 0, input=ones(4)))
    counts = [block] * size
    for wrong in (counts[1:], [*counts, 1], [-1, *counts[1:]], [0.5, *counts[1:]], 3, None, ["4"] * size):
        raises(ValueError, ["rcounts", f"{size} whole numbers"], lambda: mcr_dl.all_gatherv("nccl", ones(9 * size), None, wrong))
        raises(ValueError, ["scounts"], lambda: mcr_dl.all_to_allv("nccl", ones(9 * size), ones(9 * size), wrong, counts))
    raises(ValueError, ["displs", "whole numbers"], lambda: mcr_dl.all_gatherv("nccl", ones(9 * size), None, counts, [-1] * size))
    short = ones(block * size - 1)
    raises(ValueError, ["reach to element", f"which has {block * size - 1}"], lambda: mcr_dl.all_gatherv("nccl", short, None, counts))
    raises(ValueError, ["output", "input"], lambda: mcr_dl.all_gatherv("nccl", ones(4 * size), None, counts, input=ones(3)))
    own = {"input": ones(5)}
    raises(ValueError, ["rcounts", "5"] if rank else ["output"], lambda: mcr_dl.gatherv("nccl", ones(9 * size), 0, counts, **own))
    if size > 1:
        overlapping = [0] * size
        raises(mcr_dl.McrError, ["overlap"], lambda: mcr_dl.all_gatherv("nccl", ones(9), None, counts, overlapping, input=ones(4)))
    tensor = ones(3)
    mcr_dl.all_reduce("nccl", tensor)
    assert tensor.tolist() == [size] * 3, "the backend goes on"
    mcr_dl.finalize()


def different_calls(kind, later):
    """Ranks that call different things hear of both calls, in words, by the backend's name."""
    rank, size = begin()
    later = later == "True"
    one = rank == 1

    def call():
        if kind == "size":
            return mcr_dl.all_reduce("gloo", np.ones(5 if one else 4), async_op=later)
        if kind == "type":
            return mcr_dl.all_reduce("gloo", np.ones(4, np.float32 if one else np.float64), async_op=later)
        if kind == "operation":
            return mcr_dl.all_reduce("gloo", np.ones(4), mcr_dl.ReduceOp.MAX if one else mcr_dl.ReduceOp.SUM, async_op=later)
        if kind == "call":
            return (mcr_dl.bcast if one else mcr_dl.all_reduce)("gloo", np.ones(4), async_op=later)
        counts = [1] * size
        counts[0] += one
        return mcr_dl.all_gatherv("gloo", np.ones(size + 1), None, counts, async_op=later)

    def whole():
        work = call()
        if work is not None:
            work.wait()

    start = time.monotonic()
    raises(mcr_dl.McrError, ["mcr_dl: ", f"rank {rank} of {size}", "'gloo'", "rank 0", "rank 1"], whole)
    assert time.monotonic() - start < 10, "it took longer than the ranks need to compare"


def death(later):
    """The others hear that a rank has died, on the backend that they use."""
    rank, size = begin()
    mcr_dl.all_reduce("nccl", np.ones(3))
    if rank == 1:
        os._exit(7)
    start = time.monotonic()

    def call():
        work = mcr_dl.all_reduce("nccl", np.ones(3), async_op=later == "True")
        if work is not None:
            work.wait()

    raises(mcr_dl.McrError, ["rank 1"], call)
    assert time.monotonic() - start < 10


def no_carrier():
    """A backend whose carrier the ranks lack is refused by init, with the cause; others can be made then."""
    raises(mcr_dl.McrError, ["'mv2-gdr'", "goes by mpi", "cannot carry"], lambda: mcr_dl.init(["mv2-gdr", "nccl"]))
    assert mcr_dl.get_backends() == []
    raises(mcr_dl.McrError, ["'mpi'"], lambda: mcr_dl.init(["nccl", "mpi"]))
    mcr_dl.init("nccl")
    tensor = np.ones(3)
    mcr_dl.all_reduce("nccl", tensor)
    assert tensor.tolist() == [mcr_dl.get_size()] * 3
    mcr_dl.finalize()


def late_rank():
    """A time limit of init's: the call that passes it says who is missing."""
    mcr_dl.init("nccl", timeout=1)
    if mcr_dl.get_rank() == 1:
        time.sleep(4)
        return
    start = time.monotonic()
    raises(mcr_dl.McrError, ["all_reduce"], lambda: mcr_dl.all_reduce("nccl", np.ones(3)))
    assert 0.5 < time.monotonic() - start < 3.5
