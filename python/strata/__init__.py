"""Strata: NCCL's collectives, here for programs in Python.

This package imports nothing but Python's own modules. `strata.torch` imports PyTorch.
"""

__version__ = "0.1.0"
