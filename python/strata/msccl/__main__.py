"""`python -m strata.msccl` runs a script and writes the trace of its program to standard output.

usage: python -m strata.msccl [--program NUMBER] SCRIPT [ARGUMENTS ...]

XML() and Trace() of the script print nothing, Check() runs no command, and what the script prints goes to standard error.
--program chooses one of several programs, counted from 1.
"""

import contextlib
import os
import runpy
import sys

from strata.msccl._errors import ProgramError
from strata.msccl.language import _program


def main() -> None:
    arguments, chosen = sys.argv[1:], None
    if arguments[:1] == ["--program"] and len(arguments) > 1 and arguments[1].isdecimal():
        chosen, arguments = int(arguments[1]), arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__.strip())
    script = arguments[0]
    if not os.path.isfile(script):
        sys.exit(f"strata: there is no script {script}")
    sys.argv = arguments
    # As Python does for a script that it runs itself.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    _program.collect_only = True
    with contextlib.redirect_stdout(sys.stderr):
        try:
            runpy.run_path(script, run_name="__main__")
        except ProgramError as error:
            sys.exit(f"strata: {error}")
    made = _program.collected
    names = ", ".join(f"{number} {name}" for number, (name, _) in enumerate(made, 1))
    if chosen is None and len(made) == 1:
        chosen = 1
    if chosen is None or not 1 <= chosen <= len(made):
        sys.exit(f"strata: {script} has {len(made)} programs ({names or 'none'}); --program NUMBER chooses one")
    print(made[chosen - 1][1], end="")


if __name__ == "__main__":
    main()
