"""`python -m strata.torch train.py ...` runs a script that says "gloo" with Strata in gloo's place.

`-m` names a module in place of a file, as Python's own does; `torchrun -m strata.torch train.py ...` starts several ranks.
A process that the script starts anew (not by a fork) has gloo again.
"""

import logging
import os
import runpy
import sys
from pathlib import Path

_USAGE = "usage: python -m strata.torch [-m] SCRIPT [ARGUMENTS]"


def stand_in() -> None:
    """Makes groups of Strata's where the program says "gloo"."""
    import torch.distributed as dist

    from . import OLD, create

    if OLD:
        # It looks for gloo before it looks at what is registered.
        sys.exit('strata.torch: to stand in for "gloo" takes PyTorch 2.14 or later; have the script say "strata"')
    dist.Backend.register_backend("gloo", create, extended_api=True, devices=["cpu", "cuda"])
    text = 'strata: "gloo" makes groups of Strata in this process (python -m strata.torch)'
    logging.getLogger("strata.torch").info(text)
    if os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(_USAGE)
    stand_in()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
