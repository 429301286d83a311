"""The collectives of `strata.msccl.language.collectives`, for scripts that import them from here."""

from strata.msccl.language.collectives import *  # noqa: F401,F403
