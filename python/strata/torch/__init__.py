"""A torch.distributed backend, "strata", for CPU tensors.

    torch.distributed.init_process_group("strata")

PyTorch 2.14 and later finds the backend by its entry point. Before that, `import strata.torch` registers it.
"""

import torch.distributed as dist

_NAME = "strata"


def create(options, backend_options=None):
    """What `init_process_group` and `new_group` call for the name "strata". The first call opens the library."""
    from ._group import create

    return create(options, backend_options)


def register() -> None:
    """Makes the backend known to torch.distributed. Once is enough."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, create, extended_api=True, devices=["cpu", "cuda"])


register()
