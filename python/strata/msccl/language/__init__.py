"""The words of a program: `chunk` refers to chunks, `copy` and `reduce` of a reference are its steps.

    with MSCCLProgram("ring", fully_connected(4), AllReduce(4, 4, True), instances=1):
        first = chunk(0, Buffer.input, 0)
        second = chunk(1, Buffer.input, 0).reduce(first)
        ...
        Check()
        XML()
"""

from strata.msccl._errors import CommandError, ProgramError, wrong
from strata.msccl.language import _program
from strata.msccl.language._program import MSCCLProgram, Ref
from strata.msccl.language.buffer import BufferSlice
from strata.msccl.language.chunk import Chunk, ReduceChunk
from strata.msccl.language.ir import Buffer, ThreadblockPolicy

__all__ = [
    "Buffer", "BufferSlice", "Check", "Chunk", "CommandError", "MSCCLProgram", "ProgramError", "ReduceChunk", "Ref",
    "ThreadblockPolicy", "Trace", "XML", "chunk", "create_scratch", "parallelize",
]  # fmt: skip


def chunk(rank, buffer, index, size=1):
    """A reference to the chunks of a rank's buffer from `index` on, as they are now."""
    return _program.current().get_ref(rank, buffer, index, size)


def create_scratch(rank, name):
    """Makes a scratch buffer. A copy to a name makes it, too."""
    prog = _program.current()
    if isinstance(name, Buffer) and name is not Buffer.scratch:
        raise wrong(f"Buffer.{name.name} is the collective's and no scratch buffer")
    return prog.scratch(prog.check_rank(rank), name)


class parallelize:  # noqa: N801
    """Steps of a block `with parallelize(n):` are cut into n parts each, which run in parallel on channels of their own."""

    def __init__(self, instances):
        self._prog = _program.current()
        self._parts = self._prog.part_count(instances)

    def __enter__(self):
        self._prog.open_parts(self._parts)

    def __exit__(self, kind, error, traceback):
        self._prog.close_parts()


def XML(file=None):
    """Prints the program as MSCCL XML, proved, or writes it to a file, with the contract of a custom collective beside it."""
    prog = _program.current()
    if _program.collect_only:
        return
    if file is None:
        print(prog.generate_xml(), end="")
    else:
        prog.write_xml(file)


def Trace():
    """Prints the program's trace, from which `strata plan compile` makes MSCCL XML."""
    prog = _program.current()
    if not _program.collect_only:
        print(prog.trace(), end="")


def Check():
    """True if the program does what its collective says, and its compiled form, too; else an error."""
    return _program.current().check()
