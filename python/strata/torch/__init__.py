"""A torch.distributed backend, "strata", for CPU tensors.

    torch.distributed.init_process_group("strata")

PyTorch finds the backend by its entry point; nothing has to be imported. PyTorch before 2.14 does not: `import strata.torch`.
"""

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


def register() -> None:
    """Makes the backend known to torch.distributed. Once is enough."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, create, extended_api=True, devices=["cpu", "cuda"])


register()
