"""The functions of MCR-DL's Listing 1, as methods of a group of ranks.

Each takes a backend's name first. A call with `async_op` false has ended when it returns; else it has been queued, and the
result is a handle. A tensor is contiguous; where the listing has one tensor for what goes in and out, `input` may name another.

Calls that are made again with the same tensors take what was prepared for them (`_kept`): arguments for C. A tensor that has
changed, in type, size or memory, is found out by its `fits`.
"""

import atexit
import os
import time
import weakref
from ctypes import c_int, c_size_t, c_void_p

from ._backends import Backends, meet_by_launcher
from ._calls import NULL, function
from ._memory import HOST, ReduceOp, memory_of

# Calls that are kept, of each function.
_MOST_KEPT = 512
# Seconds that queued calls have at the end of the interpreter.
_EXIT_SECONDS = 5.0
_worlds: "weakref.WeakSet[World]" = weakref.WeakSet()


def _place(memory, offset=0) -> c_void_p:
    """An address in a tensor, `offset` elements from its first."""
    return c_void_p(memory.address + offset * memory.bytes_each)


def _counts(values):
    """A list of counts as C has it; null for None."""
    return NULL if values is None else (c_size_t * len(values))(*values)


class World:
    """A group of ranks. All ranks make the calls of one backend in the same order."""

    def __init__(self, meet=meet_by_launcher):
        self._backends = Backends(meet)
        self._kept = {}
        self._kept_pairs = {}
        _worlds.add(self)

    # Backends.

    def get_backends(self) -> "list[str]":
        """The names of the backends that `init` has made, in its order."""
        return list(self._backends.named)

    def init(self, backends="auto", *, timeout=None, device=None) -> None:
        """Makes backends: a name or a list of names. All ranks call, with the same names in the same order.

        `timeout`: seconds that the ranks may take to meet, and that each later call may take; 0 sets no limit, None leaves
        STRATA_BOOTSTRAP_TIMEOUT_MS and STRATA_TIMEOUT_MS. `device`: "cuda" for tensors on PyTorch's current GPU as well, "cpu" for the
        host alone; None: "cuda" where PyTorch has begun to use it.
        """
        self._backends.init(backends, timeout, device)

    def finalize(self, backends=None) -> None:
        """Ends backends, by default all, when what is queued on them has ended. All ranks call."""
        self._kept.clear()
        self._kept_pairs.clear()
        self._backends.finalize(backends)

    def synchronize(self, backends=None) -> None:
        """Waits until all calls of these backends, by default of all, have ended. Raises the first error that no handle has raised."""
        first = None
        for lane in self._backends.lanes_of(backends):
            try:
                lane.synchronize()
            except RuntimeError as error:
                first = first or error
        if first is not None:
            raise first

    def get_size(self, backend="auto") -> int:
        """How many ranks a backend has."""
        self._backends.find(backend)
        return self._backends.size

    def get_rank(self, backend="auto") -> int:
        """This process's rank in a backend."""
        self._backends.find(backend)
        return self._backends.rank

    # What the functions have in common.

    def _lane(self, what, backend, memories):
        """The lane that takes these tensors, and the backend."""
        found = self._backends.find(backend)
        devices = {memory.device for memory in memories}
        if len(devices) > 1:
            raise ValueError(f"mcr_dl: {what}: the tensors are on {' and '.join(sorted(devices))}, and must be on one device")
        device = devices.pop()
        lane = found.lane if device == HOST else found.device
        if lane is None:
            have = "processors" if device != HOST else "GPUs"
            raise TypeError(f"mcr_dl: {what}: a tensor is on {device}, and backend {backend!r} takes tensors on {have}; see init's device")
        if device != HOST:
            lane.check(device, what)
        return lane, found

    def _do(self, what, backend, name, arguments, memories, async_op, kept=None):
        """Makes or queues a call of the C function `name`; `kept` is the key under which it is kept for the next time."""
        lane, found = self._lane(what, backend, memories)
        config = found.config
        if config:
            name += "Config"
        if async_op:
            return lane.queue(what, name, arguments, config, [memory.owner for memory in memories])
        lane.call(what, name, arguments, config, memories)
        if kept is not None and lane is found.lane and all(memory.fits is not None for memory in memories):
            table, key = kept
            if len(table) >= _MOST_KEPT:
                table.clear()
            made = (function(name), lane.sync_arguments(arguments, config), lane, what)
            table[key] = (*(memory.fits for memory in memories), *made)
        return None

    def _again(self, table, key, *tensors) -> bool:
        """Makes a call that has been kept, if it was; False where it has to be prepared."""
        try:
            kept = table.get(key)
        except TypeError:
            # Of a name or an operation that is none; what follows says so.
            return False
        if kept is None:
            return False
        for fits, tensor in zip(kept, tensors):
            if not fits(tensor):
                return False
        function, arguments, lane, what = kept[len(tensors) :]
        code = function(*arguments)
        if code:
            raise lane.failure(what, code)
        return True

    def _root(self, what, root) -> int:
        if type(root) is not int or not 0 <= root < self._backends.size:
            raise ValueError(f"mcr_dl: {what}: the root {root!r} is no rank of {self._backends.size}")
        return root

    def _block(self, what, memory, name) -> int:
        """The elements of a rank's block of a tensor that has one block a rank."""
        block, rest = divmod(memory.count, self._backends.size)
        if rest:
            raise ValueError(f"mcr_dl: {what}: {name} has {memory.count} elements, which are no equal blocks for {self._backends.size} ranks")
        return block

    def _same(self, what, one, other, count, names):
        """Fails unless `other` has `count` elements of `one`'s type."""
        if one.kind != other.kind:
            raise TypeError(f"mcr_dl: {what}: {names[0]} is {one.kind}, and {names[1]} is {other.kind}")
        if other.count != count:
            raise ValueError(
                f"mcr_dl: {what}: {names[0]} has {one.count} elements, so {names[1]} must have {count}, and has {other.count}"
            )

    # Messages.

    def send(self, backend, tensor, rank, async_op=False):
        """Sends a tensor to a rank, which calls `recv` by the same backend. It may wait for that."""
        return self._message("send", "ncclSend", backend, tensor, rank, async_op)

    def recv(self, backend, tensor, rank, async_op=False):
        """Receives a tensor from a rank."""
        return self._message("recv", "ncclRecv", backend, tensor, rank, async_op)

    def _message(self, what, name, backend, tensor, rank, async_op):
        found, size = self._backends.find(backend), self._backends.size
        if not found.moves:
            raise ValueError(f"mcr_dl: {what}: {backend!r} names an algorithm, and messages have none; name a backend")
        if type(rank) is not int or not 0 <= rank < size or rank == self._backends.rank:
            raise ValueError(f"mcr_dl: {what}: {rank!r} is no other rank of {size}; this is rank {self._backends.rank}")
        memory = memory_of(tensor, "tensor", what == "recv")
        code, count = memory.moved()
        arguments = (_place(memory), c_size_t(count), c_int(code), c_int(rank))
        return self._do(what, backend, name, arguments, [memory], async_op)

    # All ranks' tensors to all ranks.

    def all_to_all_single(self, backend, output, input, async_op=False):
        """Block j of rank i's input becomes block i of rank j's output. All blocks are equal."""
        if not async_op:
            try:
                kept = self._kept_pairs.get((backend, id(output), id(input), "all_to_all_single"))
            except TypeError:
                # Of a backend that is no name; what follows says so.
                kept = None
            if kept is not None and kept[0](output) and kept[1](input):
                code = kept[2](*kept[3])
                if code:
                    raise kept[4].failure(kept[5], code)
                return None
        what = "all_to_all_single"
        self._backends.find(backend)
        to, of = memory_of(output, "output", True), memory_of(input, "input", False)
        self._same(what, to, of, to.count, ("output", "input"))
        code, count = of.moved(self._block(what, of, "input"))
        arguments = (_place(of), _place(to), c_size_t(count), c_int(code))
        key = (self._kept_pairs, (backend, id(output), id(input), what))
        return self._do(what, backend, "ncclAlltoAll", arguments, [to, of], async_op, key)

    def all_to_all(self, backend, output, input, async_op=False):
        """Tensor j of rank i's list becomes tensor i of rank j's. Sizes may differ, and may be 0."""
        what, size = "all_to_all", self._backends.size
        self._backends.find(backend)
        lists = []
        for tensors, name in ((output, "output"), (input, "input")):
            if not isinstance(tensors, (list, tuple)) or len(tensors) != size:
                raise ValueError(f"mcr_dl: {what}: {name} must be a list of {size} tensors, one a rank")
            lists.append([memory_of(tensor, f"{name}[{at}]", name == "output") for at, tensor in enumerate(tensors)])
        to, of = lists
        for memory in (*to, *of):
            if memory.kind != of[0].kind:
                raise TypeError(f"mcr_dl: {what}: input[0] is {of[0].kind}, and another tensor is {memory.kind}")
        # One buffer each, from the first address on, with blocks anywhere.
        arguments = []
        for memories in (of, to):
            filled = [memory.address for memory in memories if memory.count]
            first = min(filled, default=0)
            sizes = [memory.count * memory.bytes_each for memory in memories]
            places = [memory.address - first if memory.count else 0 for memory in memories]
            arguments += [c_void_p(first), _counts(sizes), _counts(places)]
        # Bytes: tensors need not lie at whole elements from each other.
        arguments.append(c_int(1))
        return self._do(what, backend, "strataAllToAllV", tuple(arguments), [*to, *of], async_op)

    def all_to_allv(
        self, backend, output, input, scounts, rcounts, sdispls=None, rdispls=None, async_op=False
    ):
        """Rank i's elements for rank j, `scounts[j]` from `sdispls[j]` on, become those that j expects of i. None: one after another."""
        what = "all_to_allv"
        self._backends.find(backend)
        to, of = memory_of(output, "output", True), memory_of(input, "input", False)
        if to.kind != of.kind:
            raise TypeError(f"mcr_dl: {what}: output is {to.kind}, and input is {of.kind}")
        sends = self._blocks(what, of, scounts, sdispls, ("input", "scounts", "sdispls"))
        recvs = self._blocks(what, to, rcounts, rdispls, ("output", "rcounts", "rdispls"))
        arguments = (_place(of), *sends[:2], _place(to), *recvs[:2], c_int(of.moved()[0]))
        return self._do(what, backend, "strataAllToAllV", arguments, [to, of], async_op)

    def _blocks(self, what, memory, counts, displs, names):
        """Counts and places of a tensor's blocks as C has them, and as lists of elements."""
        tensor, name_of_counts, name_of_places = names
        counts = self._numbers(what, counts, name_of_counts)
        if displs is None:
            places, at = [], 0
            for count in counts:
                places.append(at)
                at += count
        else:
            places = self._numbers(what, displs, name_of_places)
        last = max((at + count for at, count in zip(places, counts) if count), default=0)
        if last > memory.count:
            raise ValueError(
                f"mcr_dl: {what}: {name_of_counts} and {name_of_places} reach to element {last} of {tensor}, which has {memory.count}"
            )
        per_element = memory.moved(1)[1]
        scaled = (
            (counts, places) if per_element == 1 else ([n * per_element for n in counts], [n * per_element for n in places])
        )
        return _counts(scaled[0]), _counts(scaled[1]), counts, places

    def _numbers(self, what, values, name) -> "list[int]":
        size = self._backends.size
        try:
            numbers = [int(value) for value in values]
            is_right = len(numbers) == size and min(numbers) >= 0 and all(map(lambda a, b: a == b, numbers, values))
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise ValueError(f"mcr_dl: {what}: {name} must be {size} whole numbers of at least 0, one a rank, not {values!r}")
        return numbers

    # Reductions.

    def all_reduce(self, backend, output, op=ReduceOp.SUM, async_op=False):
        """Every rank's tensor becomes the reduction of all."""
        if not async_op:
            try:
                kept = self._kept.get((backend, id(output), op))
            except TypeError:
                # Of a backend or an operation that is none; what follows says so.
                kept = None
            if kept is not None and kept[0](output):
                code = kept[1](*kept[2])
                if code:
                    raise kept[3].failure(kept[4], code)
                return None
        self._backends.find(backend)
        memory = memory_of(output, "output", True)
        code, count, operation = memory.reduced(op)
        place = _place(memory)
        arguments = (place, place, c_size_t(count), c_int(code), c_int(operation))
        key = (self._kept, (backend, id(output), op))
        return self._do("all_reduce", backend, "ncclAllReduce", arguments, [memory], async_op, key)

    def reduce(self, backend, output, root=0, op=ReduceOp.SUM, async_op=False):
        """The root's tensor becomes the reduction of all; other ranks' stay."""
        key = ("reduce", backend, id(output), root, op)
        if not async_op and self._again(self._kept, key, output):
            return None
        self._backends.find(backend)
        root = self._root("reduce", root)
        memory = memory_of(output, "output", root == self._backends.rank)
        code, count, operation = memory.reduced(op)
        place = _place(memory)
        arguments = (place, place, c_size_t(count), c_int(code), c_int(operation), c_int(root))
        return self._do("reduce", backend, "ncclReduce", arguments, [memory], async_op, (self._kept, key))

    def reduce_scatter(self, backend, output, root=None, op=ReduceOp.SUM, async_op=False, *, input=None):
        """Rank i gets block i of the reduction of all tensors, in place of that block of its own, or of `input` in all of `output`.

        The listing has a root, which this collective has no use for; None, or any rank.
        """
        what, tensors = "reduce_scatter", (output,) if input is None else (output, input)
        table, key = self._kept if input is None else self._kept_pairs, ("reduce_scatter", backend, id(output), id(input), root, op)
        if not async_op and self._again(table, key, *tensors):
            return None
        self._backends.find(backend)
        if root is not None:
            self._root(what, root)
        to = memory_of(output, "output", True)
        of = to if input is None else memory_of(input, "input", False)
        block = self._block(what, of, "output" if input is None else "input")
        if input is not None:
            self._same(what, of, to, block, ("input", "output"))
        code, count, operation = of.reduced(op, block)
        place = _place(to, self._backends.rank * block if input is None else 0)
        arguments = (_place(of), place, c_size_t(count), c_int(code), c_int(operation))
        memories = [to] if input is None else [to, of]
        return self._do(what, backend, "ncclReduceScatter", arguments, memories, async_op, (table, key))

    # From and to one rank, and from all to all.

    def bcast(self, backend, output, root=0, async_op=False):
        """Every rank's tensor becomes the root's."""
        key = ("bcast", backend, id(output), root)
        if not async_op and self._again(self._kept, key, output):
            return None
        self._backends.find(backend)
        root = self._root("bcast", root)
        memory = memory_of(output, "output", root != self._backends.rank)
        code, count = memory.moved()
        place = _place(memory)
        arguments = (place, place, c_size_t(count), c_int(code), c_int(root))
        return self._do("bcast", backend, "ncclBroadcast", arguments, [memory], async_op, (self._kept, key))

    def all_gather(self, backend, output, input, async_op=False):
        """Every rank's `output` becomes all ranks' inputs, one after another. In place where `input` is the rank's block of it."""
        what, key = "all_gather", ("all_gather", backend, id(output), id(input))
        if not async_op and self._again(self._kept_pairs, key, output, input):
            return None
        self._backends.find(backend)
        to, of = memory_of(output, "output", True), memory_of(input, "input", False)
        self._same(what, of, to, of.count * self._backends.size, ("input", "output"))
        code, count = of.moved()
        arguments = (_place(of), _place(to), c_size_t(count), c_int(code))
        return self._do(what, backend, "ncclAllGather", arguments, [to, of], async_op, (self._kept_pairs, key))

    def gather(self, backend, output, root=0, async_op=False, *, input=None):
        """The root gets every rank's block. Its `output` has all blocks, its own in its place; other ranks' is what they send.

        With `input` every rank sends that, and only the root has an `output`.
        """
        return self._rooted("gather", "ncclGather", backend, output, input, root, async_op)

    def scatter(self, backend, output, root=0, async_op=False, *, input=None):
        """Every rank gets its block of the root's. The root's `output` has all blocks, and its own stays; other ranks' is what they get.

        With `input`, the root's alone, every rank gets its block in `output`.
        """
        return self._rooted("scatter", "ncclScatter", backend, output, input, root, async_op)

    def _rooted(self, what, name, backend, output, input, root, async_op):
        self._backends.find(backend)
        root, rank = self._root(what, root), self._backends.rank
        whole, part, names = self._parts(what, output, input, root == rank)
        memories = [memory for memory in (whole, part) if memory is not None]
        if whole is not None:
            block = self._block(what, whole, names[0])
            if part is not None:
                self._same(what, part, whole, part.count * self._backends.size, (names[1], names[0]))
        else:
            block = part.count
        code, count = memories[0].moved(block)
        own = _place(part) if part is not None else _place(whole, rank * block)
        both = [own, NULL if whole is None else _place(whole)]
        if what == "scatter":
            both.reverse()
        arguments = (*both, c_size_t(count), c_int(code), c_int(root))
        return self._do(what, backend, name, arguments, memories, async_op)

    def _parts(self, what, output, input, is_root):
        """The tensor of all blocks (None but at the root), that of one block (None where it is part of the other), and names."""
        gathers = what.startswith("gather")
        if input is None:
            written = is_root == gathers
            memory = memory_of(output, "output", written)
            return (memory, None, ("output", None)) if is_root else (None, memory, (None, "output"))
        if gathers:
            whole = memory_of(output, "output", True) if is_root else None
            return whole, memory_of(input, "input", False), ("output", "input")
        whole = memory_of(input, "input", False) if is_root else None
        return whole, memory_of(output, "output", True), ("input", "output")

    # Blocks of different sizes.

    def gatherv(self, backend, output, root=0, rcounts=None, displs=None, async_op=False, *, input=None):
        """`gather` of blocks of different sizes: at the root, `rcounts[i]` elements of rank i, from `displs[i]` of `output` on.

        Other ranks may give None. Displacements of None: one block after another.
        """
        names = ("rcounts", "displs")
        return self._rooted_v("gatherv", "strataGatherV", backend, output, input, root, rcounts, displs, names, async_op)

    def scatterv(self, backend, output, root=0, scounts=None, displs=None, async_op=False, *, input=None):
        """`scatter` of blocks of different sizes: of the root's tensor, `scounts[i]` elements from `displs[i]` on go to rank i."""
        names = ("scounts", "displs")
        return self._rooted_v("scatterv", "strataScatterV", backend, output, input, root, scounts, displs, names, async_op)

    def _rooted_v(self, what, name, backend, output, input, root, counts, displs, names, async_op):
        self._backends.find(backend)
        root, rank = self._root(what, root), self._backends.rank
        whole, part, of = self._parts(what, output, input, root == rank)
        memories = [memory for memory in (whole, part) if memory is not None]
        blocks = [NULL, NULL]
        if whole is not None:
            *blocks, elements, places = self._blocks(what, whole, counts, displs, (of[0], *names))
            block = elements[rank]
            if part is not None:
                self._same(what, whole, part, block, (of[0], of[1]))
        else:
            block = part.count
            if counts is not None and self._numbers(what, counts, names[0])[rank] != block:
                raise ValueError(f"mcr_dl: {what}: {names[0]} has {counts[rank]} elements of rank {rank}, and {of[1]} {block}")
        code, count = memories[0].moved(block)
        own = _place(part) if part is not None else _place(whole, places[rank])
        base = NULL if whole is None else _place(whole)
        # The C functions have the part of one block with its count, and that of all with counts and places.
        one, all_of = (own, c_size_t(count)), (base, *blocks)
        arguments = (*one, *all_of) if what == "gatherv" else (*all_of, *one)
        return self._do(what, backend, name, (*arguments, c_int(code), c_int(root)), memories, async_op)

    def all_gatherv(self, backend, output, root=None, rcounts=None, displs=None, async_op=False, *, input=None):
        """Every rank gets every rank's block: `rcounts[i]` elements of rank i, from `displs[i]` of `output` on; its own is there, or is `input`.

        All ranks give all counts. The listing has a root, which this collective has no use for; None, or any rank.
        """
        what = "all_gatherv"
        self._backends.find(backend)
        if root is not None:
            self._root(what, root)
        to = memory_of(output, "output", True)
        counts, places, elements, at = self._blocks(what, to, rcounts, displs, ("output", "rcounts", "displs"))
        rank, memories = self._backends.rank, [to]
        if input is None:
            own = _place(to, at[rank])
        else:
            of = memory_of(input, "input", False)
            self._same(what, to, of, elements[rank], ("output", "input"))
            memories.append(of)
            own = _place(of)
        arguments = (own, _place(to), counts, places, c_int(to.moved()[0]))
        return self._do(what, backend, "strataAllGatherV", arguments, memories, async_op)

    # Ends.

    def leave(self) -> None:
        """At the end of the interpreter, whose tensors go: ends calls that do not end by themselves, and all backends."""
        end = time.monotonic() + _EXIT_SECONDS
        for lane in self._backends.lanes_of(None) if self._backends.made else ():
            while lane.is_busy() and time.monotonic() < end:
                time.sleep(0.001)
            lane.close(lane.is_busy())
        self._abandon()

    def _abandon(self) -> None:
        self._kept, self._kept_pairs = {}, {}
        self._backends.abandon()


@atexit.register
def _leave_all() -> None:
    for world in list(_worlds):
        world.leave()


def _abandon_all() -> None:
    for world in list(_worlds):
        world._abandon()


# The communicators are the parent's; a forked child can make its own.
os.register_at_fork(after_in_child=_abandon_all)
