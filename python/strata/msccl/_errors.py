"""Errors of a program, and the line of the user's script that they belong to."""

import functools
import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ProgramError(Exception):
    """A program is wrong. The text begins with the script's line."""


class CommandError(Exception):
    """`strata plan compile` cannot be run, or refuses the program."""


@functools.lru_cache(maxsize=None)
def _is_own(path: str) -> bool:
    return os.path.abspath(path).startswith(_PACKAGE)


@functools.lru_cache(maxsize=None)
def _shown(path: str) -> str:
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith(os.pardir) else relative


def where() -> str:
    """The innermost line on the stack that is not of this package, as `file:line`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def wrong(text: str) -> ProgramError:
    """The error that this text makes at the script's line."""
    return ProgramError(f"{where()}: {text}")
