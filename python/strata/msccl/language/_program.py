"""A program: its buffers as they are after each step, its steps, and references to chunks.

Each place counts how often it has been written. A reference knows the counts of its places, and is stale when they have
changed: the data that it was made for is gone.
"""

import operator

from strata.msccl import _command, _contract, _trace
from strata.msccl._errors import CommandError, ProgramError, where, wrong
from strata.msccl.language.buffer import BufferSlice
from strata.msccl.language.chunk import Chunk, ReduceChunk
from strata.msccl.language.ir import Buffer, ThreadblockPolicy

_current = None

# Whether XML() and Trace() print and Check() runs the command; `python -m strata.msccl` takes the finished programs instead.
collect_only = False
collected = []


def current():
    """The program whose `with` block this is."""
    if _current is None:
        raise wrong("there is no program here: write this in a block of `with MSCCLProgram(...):`")
    return _current


def _integer(value, what):
    try:
        return operator.index(value)
    except TypeError:
        raise wrong(f"{what} is {value!r}, not a whole number") from None


def _written(name, index, size=1):
    """A place as a message shows it."""
    shown = {Buffer.input: "input", Buffer.output: "output", Buffer.scratch: "scratch"}.get(name, str(name))
    return f"{shown}[{index}]" if size == 1 else f"{shown}[{index}:{index + size}]"


class MSCCLProgram:
    """A program for the ranks of a topology. `with MSCCLProgram(...):` opens the block that its steps are written in.

    `instances` copies of the program run on a part of each chunk each: consecutive parts of a chunk belong to different
    copies where `interleaved_replication`, else each copy has consecutive chunks. With `threadblock_policy` manual the
    numbers `sendtb` and `recvtb` of the steps count, else the compiler assigns thread blocks. The last three are taken so
    that scripts run: the compiler orders steps and proves what it writes whatever they say.
    """

    def __init__(
        self, name, topo, collective, instances, protocol="Simple", threadblock_policy=ThreadblockPolicy.auto,
        interleaved_replication=True, instr_fusion=True, check_xml=True, dependence_nop=False,
    ):  # fmt: skip
        if protocol not in ("Simple", "LL", "LL128"):
            raise wrong(f"protocol {protocol!r} is none of Simple, LL and LL128")
        if topo.num_nodes() != collective.num_ranks:
            raise wrong(f"the collective has {collective.num_ranks} ranks and the topology {topo.num_nodes()}")
        if _trace.collective_named(collective.name) is None:
            raise wrong(f"there is no collective {collective.name!r}; one of your own has the name custom")
        self.name = name
        self.topo = topo
        self.collective = collective
        self.num_ranks = topo.num_nodes()
        self.instances = _integer(instances, "instances")
        if self.instances < 1:
            raise wrong(f"instances is {instances}; a program has at least 1")
        self.protocol = protocol
        self.threadblock_policy = threadblock_policy
        self.interleaved_replication = interleaved_replication
        self.instr_fusion = instr_fusion
        self.check_xml = check_xml
        self.dependence_nop = dependence_nop
        self.buffers = collective.init_buffers()
        self.steps = []
        self._writes = {}  # (rank, buffer's identity, index): how often written, and where last
        self._parallel = None
        self._groups = 0
        self._compiled = (None, None)
        self._origins = self._starts()

    def _starts(self):
        """The place in the inputs of each chunk that they hold at first; None where two places hold the same."""
        found = {}
        for rank in range(self.num_ranks):
            for index in range(self.length(rank, Buffer.input)):
                buffer, place = self.collective.get_buffer_index(rank, Buffer.input, index)
                value = self.buffers[rank][buffer][place]
                if isinstance(value, Chunk):
                    found[value._key()] = None if value._key() in found else (rank, index)
        return found

    def __enter__(self):
        global _current
        if _current is not None:
            raise wrong(f"program {_current.name!r} is still open: a program cannot be inside another one")
        _current = self
        return self

    def __exit__(self, kind, error, traceback):
        global _current
        _current = None
        if collect_only and kind is None:
            collected.append((self.name, self.trace()))

    # Places.

    def length(self, rank, buffer):
        """Chunks of a rank's buffer."""
        lengths = self.collective.lengths()
        if lengths is not None and buffer in lengths:
            return lengths[buffer]
        return len(self.buffers[rank].get(buffer, ()))

    def check_rank(self, rank):
        """The rank, if there is such a one."""
        rank = _integer(rank, "the rank")
        if not 0 <= rank < self.num_ranks:
            raise wrong(f"rank {rank} is not in 0 to {self.num_ranks - 1}")
        return rank

    def place(self, rank, buffer, index, size):
        """Where these chunks really are. Of a buffer of the collective all of them have to be there."""
        index, size = _integer(index, "the index"), _integer(size, "the size")
        if size < 1:
            raise wrong(f"a reference to {size} chunks of {_written(buffer, index)}: it has at least 1")
        if index < 0:
            raise wrong(f"index {index} of {_written(buffer, '...')} on rank {rank} is below 0")
        if buffer in (Buffer.input, Buffer.output):
            length = self.length(rank, buffer)
            if index + size > length:
                raise wrong(f"{_written(buffer, index, size)} of rank {rank} is out of range: it has {length} chunks")
            return self.collective.get_buffer_index(rank, buffer, index)
        if buffer in ("input", "output"):
            raise wrong(f"a scratch buffer cannot have the name {buffer!r}; the collective's is Buffer.{buffer}")
        return buffer, index

    def scratch(self, rank, name):
        """A rank's scratch buffer, new if there was none."""
        if name not in self.buffers[rank]:
            self.buffers[rank][name] = BufferSlice(name)
        return self.buffers[rank][name]

    def slots(self, ref):
        """The keys of a reference's places."""
        held = id(self.buffers[ref.rank][ref.buffer])
        return [(ref.rank, held, index) for index in range(ref.index, ref._end())]

    def counts(self, ref):
        """How often each place of a reference has been written."""
        return [self._writes.get(slot, (0, None))[0] for slot in self.slots(ref)]

    def refer(self, rank, buffer, index, size, written):
        """A reference to chunks that are there; `written` is the place as the user wrote it."""
        ref = Ref(rank, buffer, index, size, self, written)
        held = self.buffers[rank].get(buffer, ())
        if not held and not isinstance(buffer, Buffer):
            raise wrong(f"rank {rank} has no scratch buffer {str(buffer)!r}: nothing has been copied there")
        for offset in range(size):
            if index + offset >= len(held) or held[index + offset] is None:
                raise wrong(f"{_written(written[0], written[1] + offset)} of rank {rank} holds nothing yet")
        ref._counts = self.counts(ref)
        return ref

    def get_ref(self, rank, buffer, index, size):
        """A reference to chunks of a rank's buffer."""
        rank = self.check_rank(rank)
        return self.refer(rank, *self.place(rank, buffer, index, size), size, (buffer, index))

    # Steps.

    def apply(self, op, src, dst, sendtb, recvtb, ch):
        """Does a step and records it; the destination is then a reference to what it holds."""
        here = where()
        src.check_fresh()
        if src.rank != dst.rank and not self.topo.link(src.rank, dst.rank):
            raise wrong(f"topology {self.topo.name} has no link from rank {src.rank} to rank {dst.rank}")
        source, target = self.buffers[src.rank][src.buffer], self.buffers[dst.rank][dst.buffer]
        overlap = src.index < dst._end() and dst.index < src._end()
        if src.rank == dst.rank and source is target and overlap:
            raise wrong(f"{src.shown()} and {dst.shown()} of rank {src.rank} overlap: one step cannot read and write both")
        for offset in range(src.size):
            value = source[src.index + offset]
            if op == "reduce":
                value = target[dst.index + offset].reduce(dst.rank, value)
            target[dst.index + offset] = value
        for slot in self.slots(dst):
            self._writes[slot] = (self._writes.get(slot, (0, None))[0] + 1, here)
        dst._counts = self.counts(dst)
        manual = self.threadblock_policy == ThreadblockPolicy.manual
        options = {
            "channel": _chosen(ch, "ch"),
            "send_tb": _chosen(sendtb, "sendtb") if manual else None,
            "recv_tb": _chosen(recvtb, "recvtb") if manual and src.rank != dst.rank else None,
            "parallel": self._parallel,
            "at": here,
        }
        self.steps.append(_trace.step(op, src.traced(), dst.traced(), src.size, options))

    def part_count(self, instances):
        """The number of parts of a block of parallelize()."""
        instances = _integer(instances, "the number of parts")
        if instances < 1:
            raise wrong(f"parallelize({instances}): the number of parts is at least 1")
        return instances

    def open_parts(self, instances):
        """Steps from here on are cut into so many parts."""
        if self._parallel is not None:
            raise wrong("a block of parallelize() is inside another one")
        self._parallel = [instances, self._groups]
        self._groups += 1

    def close_parts(self):
        """Steps from here on are whole."""
        self._parallel = None

    def last_write(self, slot):
        """The script's line that wrote a place last."""
        return self._writes[slot][1]

    # What becomes of it.

    def trace(self):
        """The trace of the steps so far, as text. A collective of one's own is checked for that."""
        chunks, in_place, contract = self.collective.chunk_factor, bool(self.collective.inplace), None
        collective = _trace.collective_named(self.collective.name)
        if collective == "custom":
            both = (Buffer.input, Buffer.output)
            chunks = max(self.length(rank, buffer) for rank in range(self.num_ranks) for buffer in both)
            shared = any(held.get(Buffer.input) is held.get(Buffer.output) for held in self.buffers)
            in_place = shared or self.result_buffer() is Buffer.input
            contract = self._contract()
        head = {
            "strata_trace": 1,
            "name": str(self.name),
            "collective": collective,
            "ranks": self.num_ranks,
            "chunks": chunks,
            "in_place": in_place,
            "instances": self.instances,
            "protocol": self.protocol,
            "policy": "interleaved" if self.interleaved_replication else "blocked",
        }
        if contract is not None:
            head["contract"] = contract
        return _trace.text(head, self.steps)

    def result_buffer(self):
        """Where the results are: in the output, or in the input of a program in place whose steps never name the output."""
        named = any(place[1] == "output" for step in self.steps for place in (step["src"], step["dst"]))
        return Buffer.input if self.collective.inplace and not named else Buffer.output

    def _contract(self):
        (passed, said), rules, left = _contract.of(self, self._origins)
        kind = type(self.collective).__name__
        if not passed:
            raise wrong(self._failed(f"{kind}.check()", passed, said))
        if not rules:
            raise wrong(
                f"{kind}.check() looks at no output that a contract can speak of: one rank's chunk of the input, or the "
                "reduction of one chunk of all ranks"
            )
        if left:
            raise wrong(
                f"{kind}.check() looks at {left} chunks that a contract cannot speak of: it knows outputs, and in them one "
                "rank's chunk of the input or the reduction of one chunk of all ranks"
            )
        return rules

    def _failed(self, check, passed, said):
        """That a check has failed, with the first line that it printed."""
        text = f"program {self.name!r} does not do what its collective says: {check} returned {passed!r}"
        return f"{text}: {said}" if said else text

    def generate_xml(self):
        """The program as MSCCL XML, compiled and proved by `strata plan compile`."""
        text = self.trace()
        if self._compiled[0] != text:
            self._compiled = (text, _command.compile_trace(text))
        return self._compiled[1]

    def write_xml(self, file):
        """Writes the program as MSCCL XML to a file, and the contract of a collective of one's own beside it."""
        _command.compile_trace(self.trace(), file)

    def check(self):
        """True: the steps do what the collective says, and so does the compiled program. Else an error."""
        passed, said = _contract.passes(self)
        if not passed:
            raise wrong(self._failed("check()", passed, said))
        if not collect_only:
            self.generate_xml()
        return True


def _chosen(number, what):
    """A channel's or a thread block's number; None for -1, which leaves it to the compiler."""
    number = _integer(number, what)
    if number < -1:
        raise wrong(f"{what} is {number}; a number from 0 on, or -1 for the compiler's choice")
    return None if number == -1 else number


class Ref:
    """A reference to consecutive chunks of a rank's buffer, as they are when it is made."""

    def __init__(self, rank, buffer, index, size, prog, written=None):
        self.rank = rank
        self.buffer = buffer
        self.index = index
        self.size = size
        self.prog = prog
        self._as = written or (buffer, index)
        self._counts = []

    def __repr__(self):
        return f"Ref(rank {self.rank}, {self.shown()})"

    def __eq__(self, other):
        return isinstance(other, Ref) and self._where() == other._where()

    def __hash__(self):
        return hash(self._where())

    def _where(self):
        return self.rank, self.buffer, self.index, self.size

    def _end(self):
        return self.index + self.size

    def shown(self):
        """The place as the user wrote it, for messages."""
        return _written(*self._as, self.size)

    def traced(self):
        """The place as the user wrote it, for the trace."""
        name, index = self._as
        return self.rank, name.name if isinstance(name, Buffer) else str(name), index

    def check_fresh(self):
        """Raises where the chunks have been overwritten since the reference was made."""
        for slot, then, now in zip(self.prog.slots(self), self._counts, self.prog.counts(self)):
            if then != now:
                raise wrong(
                    f"this reference to {self.shown()} of rank {self.rank} is stale: "
                    f"{self.prog.last_write(slot)} has written there since it was made; chunk() makes a new one"
                )

    def split(self, num):
        """References to `num` equal parts."""
        if num < 1 or self.size % num:
            raise wrong(f"{self.size} chunks cannot be split into {num} equal parts")
        self.check_fresh()
        size, (name, index) = self.size // num, self._as
        starts = range(0, self.size, size)
        return [self.prog.refer(self.rank, self.buffer, self.index + at, size, (name, index + at)) for at in starts]

    def group(self, other):
        """A reference from the first to the last chunk of both, which are of one buffer."""
        if (self.rank, self.buffer) != (other.rank, other.buffer):
            raise wrong(f"{self} and {other} are not of one buffer")
        self.check_fresh()
        other.check_fresh()
        first = self if self.index < other.index else other
        size = max(self._end(), other._end()) - first.index
        same = self._as[0] == other._as[0]
        written = first._as if same else (first.buffer, first.index)
        return self.prog.refer(self.rank, self.buffer, first.index, size, written)

    def copy(self, dst, buffer=None, index=-1, sendtb=-1, recvtb=-1, ch=-1):
        """Copies the chunks to a place on rank `dst`, and returns a reference to them there.

        Without a buffer they go to the same one; without an index to the same place of it, or behind a scratch buffer's end.
        """
        prog = self.prog
        dst = prog.check_rank(dst)
        if buffer is None:
            buffer, index = self.buffer, self.index if index == -1 else index
        if buffer not in (Buffer.input, Buffer.output):
            if index == -1:
                index = len(prog.buffers[dst].get(buffer, ()))
        elif index == -1:
            raise wrong(f"a copy to {_written(buffer, '...')} needs an index")
        place, written = prog.place(dst, buffer, index, self.size), (buffer, index)
        own = prog.collective.get_buffer_index(self.rank, buffer, index)
        if place != own and buffer is Buffer.input:
            # In place, inputs are parts of one buffer, and msccl-tools takes the part of the rank that sends: an all-gather
            # copies its input to where it belongs in each output.
            place = written = own
        elif place != own:
            raise wrong(
                f"in place, {_written(buffer, index)} is {_written(*place)} on rank {dst} and {_written(*own)} on rank "
                f"{self.rank}: write which one of the two"
            )
        if place[0] not in (Buffer.input, Buffer.output):
            prog.scratch(dst, place[0])
        target = Ref(dst, *place, self.size, prog, written)
        if target == self:
            self.check_fresh()
            return self
        prog.apply("copy", self, target, sendtb, recvtb, ch)
        return target

    send = copy

    def reduce(self, other, *arguments, **options):
        """Reduces the chunks of another reference into this one's, which stays good.

        Earlier releases of msccl-tools had it the other way round, and so it is where `other` is a rank:
        `reduce(rank, buffer, index)` reduces this one's chunks into that place, and returns a reference to it.
        """
        if isinstance(other, Ref):
            return self._reduce(other, *arguments, **options)
        if other is None:
            raise wrong("there is no chunk to reduce: the other reference is None")
        return self._reduce_into(other, *arguments, **options)

    def _reduce(self, other, sendtb=-1, recvtb=-1, ch=-1):
        if other.size != self.size:
            raise wrong(f"{other} has {other.size} chunks and {self} has {self.size}: a reduction needs as many in both")
        self.check_fresh()
        self.prog.apply("reduce", other, self, sendtb, recvtb, ch)
        return self

    def _reduce_into(self, dst, buffer=None, index=-1, sendtb=-1, recvtb=-1, ch=-1):
        if buffer is None:
            buffer, index = self.buffer, self.index if index == -1 else index
        return self.prog.get_ref(dst, buffer, index, self.size)._reduce(self, sendtb, recvtb, ch)

    def _held(self, index):
        value = self.prog.buffers[self.rank][self.buffer][self.index + index]
        if isinstance(value, ReduceChunk):
            raise wrong(f"{self} holds a reduction, which has no one origin and no one destination")
        return value

    def get_origin_index(self, index=0):
        """Which chunk of its rank's input this one was."""
        return self._held(index).origin_index

    def get_origin_rank(self, index=0):
        """Whose input this chunk was in."""
        return self._held(index).origin_rank

    def get_dst_index(self, index=0):
        """Where in the output this chunk belongs."""
        return self._held(index).dst_index

    def get_dst_rank(self, index=0):
        """On which rank this chunk belongs."""
        return self._held(index).dst_rank

    def print_chunk_info(self, index=0):
        """Prints what the place holds."""
        print(self.prog.buffers[self.rank][self.buffer][self.index + index])


__all__ = ["CommandError", "MSCCLProgram", "ProgramError", "Ref"]
