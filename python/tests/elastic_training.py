"""A rank that goes through an epoch with the elastic sampler, over a communicator that goes on when ranks are lost.

usage: elastic_training.py SAMPLES BATCH [RANK:REDUCTION ...]    those ranks end themselves before that reduction

What is reduced has an element for each sample: how often it was in a global batch. Every rank writes the result of each batch."""

import ctypes
import json
import os
import signal
import sys
from ctypes import CFUNCTYPE, byref, c_char, c_int, c_int64, c_size_t, c_void_p

from strata.elastic import ElasticSampler

INT64, SUM = 4, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


library = ctypes.CDLL(os.environ["STRATA_LIBRARY"])
library.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]
library.strataCommState.argtypes = [c_void_p, c_void_p, c_size_t]
library.strataCommOnChange.argtypes = [c_void_p, c_void_p, c_void_p]
library.ncclAllReduce.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
library.ncclCommDestroy.argtypes = [c_void_p]
library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = [c_void_p], ctypes.c_char_p


def check(code):
    if code != 0:
        sys.exit(f"result {code}: {library.ncclGetLastError(None).decode()}")


def main():
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples, batch_size = int(sys.argv[1]), int(sys.argv[2])
    ends = [int(reduction) for who, reduction in (given.split(":") for given in sys.argv[3:]) if int(who) == rank]
    sampler = ElasticSampler(samples, batch_size, rank=rank, members=nranks)
    batches = sampler.batches()
    unique, comm, reduction = UniqueId(), c_void_p(), 0
    check(library.ncclGetUniqueId(byref(unique)))
    check(library.ncclCommInitRank(byref(comm), nranks, unique, rank))

    @CFUNCTYPE(None, c_void_p)
    def on_change(_):
        text = ctypes.create_string_buffer(1 << 16)
        check(library.strataCommState(comm, text, len(text)))
        sampler.follow(text.value)

    check(library.strataCommOnChange(comm, on_change, None))

    def reduce(part):
        nonlocal reduction
        if reduction in ends:
            os.kill(os.getpid(), signal.SIGKILL)
        reduction += 1
        counts = (c_int64 * samples)()
        for sample in part:
            counts[sample] += 1
        check(library.ncclAllReduce(counts, counts, samples, INT64, SUM, comm, None))
        return list(counts)

    whole = []
    for part in batches:
        counts = reduce(part)
        while (rest := batches.rest(reduction)) is not None:
            counts = [one + more for one, more in zip(counts, reduce(rest))]
        whole.append(counts)
    check(library.ncclCommDestroy(comm))
    print(json.dumps(whole))


if __name__ == "__main__":
    main()
