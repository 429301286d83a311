"""MCR-DL's functions over Strata. Programs import `mcr_dl`; this package is what stands behind it.

`World` has the functions for a group of ranks: `World(meet)` with a function that gives rank, number of ranks and an id.
"""

from ._backends import meet_by_store
from ._calls import McrError, McrTimeout, Work
from ._memory import ReduceOp
from ._names import CARRIERS
from ._world import World

__all__ = ["CARRIERS", "McrError", "McrTimeout", "ReduceOp", "Work", "World", "meet_by_store"]
