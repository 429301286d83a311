"""Which rank has a link to which."""

from strata.msccl.topologies.amd import *  # noqa: F401,F403
from strata.msccl.topologies.distributed import *  # noqa: F401,F403
from strata.msccl.topologies.generic import *  # noqa: F401,F403
from strata.msccl.topologies.nvidia import *  # noqa: F401,F403
from strata.msccl.topologies.topology import Topology  # noqa: F401
