"""Programs in the language of msccl-tools, for Strata.

The names are those of `msccl`, so a script of msccl-tools runs with another import line:

    from strata.msccl.language import *
    from strata.msccl.topologies import *
    from strata.msccl.language.collectives import AllReduce

A program is recorded as a trace, which `strata plan compile` schedules, proves and writes as MSCCL XML. This package needs
Python 3.8 and nothing else; it does not open libstrata.so.
"""

from strata.msccl._errors import CommandError, ProgramError

__all__ = ["CommandError", "ProgramError"]
