"""Names of backends, and the carrier of Strata's that stands behind each."""

import difflib

AUTO = "auto"

# What moves messages between nodes. Inside a node it is shared memory with every backend.
CARRIERS = {
    # Libraries with transports of their own: Strata's, over TCP; on a GPU in front of NCCL or RCCL that library.
    "nccl": "tcp",
    "rccl": "tcp",
    "msccl": "tcp",
    "sccl": "tcp",
    "gloo": "tcp",
    "strata": "tcp",
    "tcp": "tcp",
    # MPI: whichever one the program is started with.
    "mpi": "mpi",
    "mv2-gdr": "mpi",
    "mvapich2": "mpi",
    "mvapich2-gdr": "mpi",
    "ompi": "mpi",
    "openmpi": "mpi",
    "mpich": "mpi",
    "intel-mpi": "mpi",
    "spectrum-mpi": "mpi",
}


def is_algorithm(name: str) -> bool:
    """Whether this is no backend's name but one of an algorithm and a carrier, as `algSelection` takes it: ring@mpi."""
    return "@" in name


def unknown(name: str, known) -> ValueError:
    """The exception for a name that is none of `known`."""
    near = difflib.get_close_matches(name.lower(), known, 1, 0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"mcr_dl: there is no backend {name!r}; {meant}there are {', '.join(known)}")


def listed(backends) -> "list[str]":
    """The backends' names that a program gives: one, or a list of them."""
    names = [backends] if isinstance(backends, str) else backends
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"mcr_dl: backends are a name or a list of names, not {backends!r}")
    return list(dict.fromkeys(names))
