"""A torch.distributed backend, "strata", for CPU tensors.

    torch.distributed.init_process_group("strata")

PyTorch finds the backend by its entry point; nothing has to be imported. PyTorch before 2.14 does not: `import strata.torch`.
"""

import sys

_NAME = "strata"
# The oldest that is tested, and the first whose process groups take a backend that is written in Python.
_OLDEST, _WITH_BACKENDS = (2, 13), (2, 14)

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ImportError(f"strata.torch needs PyTorch {'.'.join(map(str, _OLDEST))} or later: {error}") from error

_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if _version < _OLDEST:
    raise ImportError(f"strata.torch needs PyTorch {'.'.join(map(str, _OLDEST))} or later, and this is {torch.__version__}")
if not dist.is_available():
    raise ImportError(f"strata.torch needs torch.distributed, which PyTorch {torch.__version__} was built without")

# Whether groups have to be process groups of their own.
OLD = _version < _WITH_BACKENDS


def create(options, backend_options=None):
    """What `init_process_group` and `new_group` call for the name "strata". The first call opens the library."""
    from ._group import create

    return create(options, backend_options)


def serves(group=None) -> bool:
    """Whether Strata makes the calls of a group, by default all ranks', on CPU tensors."""
    # Without a group of Strata's the library has not been opened, and need not be there.
    if f"{__name__}._group" not in sys.modules:
        return False
    from ._ranges import serves

    return serves(group)


def wait_range(tensor, group=None) -> None:
    """Waits until a tensor is final in the calls of a group, by default all ranks', that are under way: it may be used and
    overwritten then, though the calls go on with what lies behind it in their tensors. What is in no call is final.

    Raises an exception if one of the calls fails before, and if the group has been destroyed or aborted or is not Strata's.
    """
    from ._ranges import group_of

    group_of("wait_range", group).wait_range(tensor)


def final_count(tensor, group=None) -> int:
    """How many of a contiguous tensor's elements, from its first on, are final. Raises what `wait_range` raises."""
    from ._ranges import group_of

    return group_of("final_count", group).final_count(tensor)


def register() -> None:
    """Makes the backend known to torch.distributed. Once is enough."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, create, extended_api=True, devices=["cpu", "cuda"])


register()
