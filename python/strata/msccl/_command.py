"""Runs `strata plan compile`.

The command is what STRATA_COMMAND names, else `strata` beside the library that STRATA_LIBRARY names or that the package
holds, else in the folder of this Python's commands, where a wheel puts it, else on the PATH.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from strata.msccl._errors import CommandError

_VARIABLE = "STRATA_COMMAND"


def _find() -> str:
    given = os.environ.get(_VARIABLE)
    if given and given != "auto":
        found = shutil.which(given)
        if found is None:
            raise CommandError(f"strata: {_VARIABLE}={given} is not a program that can be run")
        return found
    library = os.environ.get("STRATA_LIBRARY")
    own = Path(__file__).resolve().parent.parent / "lib"
    folder = Path(library).resolve().parent if library and library != "auto" else own
    places = [folder, folder.parent / "bin", Path(sysconfig.get_path("scripts"))]
    for found in (*(shutil.which(str(place / "strata")) for place in places), shutil.which("strata")):
        if found is not None:
            return found
    looked = ", ".join(map(str, places))
    raise CommandError(f"strata: there is no command strata in {looked} or on the PATH; {_VARIABLE} names it")


def compile_trace(text: str, output: "str | os.PathLike[str] | None" = None) -> str:
    """The MSCCL XML of the program with this trace, proved.

    With `output` it is written to that file, with the contract of a custom collective beside it, and is not given back.
    Raises CommandError where the command is not there or refuses the program, with what it says.
    """
    command = _find()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        trace.write_text(text, encoding="utf-8")
        line = [command, "plan", "compile", str(trace)]
        if output is not None:
            line += ["--output", os.fspath(output)]
        try:
            ran = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        except OSError as error:
            raise CommandError(f"strata: cannot run {command}: {error}") from None
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip() or f"exit code {ran.returncode}"
        # The file is gone by now.
        said = said.replace(str(trace), "the program")
        raise CommandError(f"{command} plan compile: {said}")
    return ran.stdout.decode(encoding="utf-8")
