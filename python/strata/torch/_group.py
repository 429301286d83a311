"""A process group of torch.distributed whose calls Strata makes.

A call with `asyncOp` false runs on the caller's thread. While calls are queued it is queued as well, so that calls keep
their order. Other calls are queued on a stream of Strata; their tensors are held until they have ended. Any thread may call:
calls of several threads come one after another, and `abort` alone does not wait for those under way.
"""

import atexit
import math
import os
import threading
import time
import weakref
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend, ErrorType, PrefixStore
from torch.distributed import DistBackendError

from .. import _lib
from . import OLD, _work
from ._collectives import Collectives, grouped
from ._elements import Copies, copy_all, is_plain, memory_of
from ._messages import Messages
from ._ranges import Ranges
from ._timer import LONGEST, after
from ._work import Done, Work

_c = _lib.lib
_ZERO = timedelta(0)
_EXIT_SECONDS = 5.0
# What C functions take: 24 days. Longer limits are this one.
_MOST_MS = 2**31 - 1
# Groups that have not ended. PyTorch's own objects do not always hold the one in Python, without which they can do nothing.
_groups: "set[Group]" = set()


class Batch:
    """The calls between `start_coalescing` and `end_coalescing`, all of one thread."""

    def __init__(self):
        self.parts = []
        self.results = []
        self.held = []
        self.copies = Copies()
        self.messages = []


class Group(Collectives, Ranges):
    """What the classes for PyTorch of 2.14 and later and for those before it have in common."""

    def _begin(self, store, rank, size, timeout, name, comm=None, limit=None):
        """Meets the other ranks. `comm` is a communicator that is there already, with a time limit of `limit` seconds."""
        self._rank = rank
        self._size = size
        self._name = name
        self._timeout = timeout.total_seconds()
        # What the communicator itself allows; a shorter time is watched over here.
        self._limit = self._timeout if limit is None else limit
        self._messages = None
        # The group's end takes the communicator away; who makes a call has the turn until it has been made or queued. A
        # signal's handler may call in the middle of a call of its thread.
        self._ending = threading.RLock()
        self._turn = threading.RLock()
        self._inflight = set()
        self._posted = set()
        self._failed = []
        self._batches = {}
        self._failure = None
        self._sequence = 0
        self._barriers = 0
        self._comm = comm
        self._leaving = None
        self._other_store = None
        try:
            # A store may serve a group of the same name again, after the first one's end.
            generation = (store.add("generation", 1) - 1) // size
            self.store = PrefixStore(f"{generation}", store)
            if comm is None:
                self._comm = self._meet()
        except Exception as error:
            raise self.failure(f"init_process_group on {self._where()}", error) from error
        self._stream = _lib.Stream()
        self._messages = Messages(self)
        _groups.add(self)

    def _meet(self):
        """A communicator of all ranks, who find each other by the store."""
        if self._rank == 0:
            self.store.set("unique_id", _lib.unique_id().hex())
        unique = bytes.fromhex(self.store.get("unique_id").decode())
        return _lib.init_host(self._size, unique, self._rank, self.timeout_ms())

    # What a call needs.

    def _where(self) -> str:
        return f"rank {self._rank} of {self._size}"

    def failure(self, what: str, error) -> DistBackendError:
        """The exception for a call that failed."""
        return DistBackendError(f"strata: {what}: {self._failure or error}")

    def timeout_ms(self) -> int:
        """The group's time limit; 0 for none."""
        return max(0, min(math.ceil(self._timeout * 1000), _MOST_MS))

    def lost(self) -> "str | None":
        """Why this group can do nothing any more, a rank that has died among other reasons; None if it can."""
        comm = self._comm or self._leaving
        if comm is None:
            return self._failure or "the group has been destroyed"
        return self._failure or _lib.failure_of(comm)

    def other_store(self):
        """The group's store over a connection of its own: a `wait` of the program's holds that of `store`."""
        if self._other_store is None:
            self._other_store = self.store.clone() if hasattr(self.store, "clone") else self.store
        return self._other_store

    def _refuse(self, call, reason, kind=ValueError):
        # PyTorch does not end the batch that an exception leaves.
        self._batches.pop(threading.get_ident(), None)
        raise kind(f"strata: {call} on {self._where()}: {reason}")

    def _batch(self):
        """The batch that this thread collects calls for, or None."""
        return self._batches.get(threading.get_ident()) if self._batches else None

    def _check(self, call, *tensors):
        """Refuses what no call of this group can take."""
        if self._comm is None:
            self._refuse(call, self._failure or "the group has been destroyed", RuntimeError)
        for tensor in tensors:
            if not (tensor.is_cpu and tensor.layout is torch.strided):
                self._refuse_tensor(call, tensor)

    def _refuse_tensor(self, call, tensor):
        if tensor.layout is not torch.strided:
            self._refuse(call, f"{tensor.layout} tensors are not supported; use to_dense()", TypeError)
        hint = (
            '; for GPUs use "cpu:strata,cuda:nccl", and LD_PRELOAD=libstrata.so to put Strata in front of NCCL'
            if tensor.device.type == "cuda"
            else ""
        )
        self._refuse(call, f"the tensor is on {tensor.device}, and this backend takes CPU tensors{hint}", TypeError)

    # Making and queueing calls.

    def _run_all(self, name, parts, result, opts, copies, held=None):
        """Makes the calls of `parts`, (call, held), as one group."""
        calls = [call for call, _held in parts]
        return self._run(name, lambda stream: grouped(calls, stream), result, opts, copies, (parts, held))

    def _run(self, name, call, result, opts, copies, held):
        """Makes a call, or queues it: `call(stream)` gives a result code."""
        self._sequence += 1
        if self._failed:
            self._forget_failures(held, copies.tensors())
        batch = self._batch()
        if batch is not None:
            batch.parts.append(call)
            batch.results.extend(result)
            batch.held.append(held)
            batch.copies.before += copies.before
            batch.copies.after += copies.after
            return None
        limit = opts.timeout if opts.timeout > _ZERO else None
        with self._turn:
            self._check(name)
            if not opts.asyncOp and not self._inflight:
                self._make(name, call, copies, limit)
                return Done(result)
            work = self._queue(name, call, result, copies, held, limit)
        if not opts.asyncOp:
            work.wait()
        return work

    def _make(self, name, call, copies, limit):
        """Makes a call, which has ended when this returns."""

        def describe():
            return f"{name} on {self._where()}"

        timer = self._watch(describe, limit)
        try:
            if copies.before:
                copy_all(copies.before)
            code = call(None)
            error = _lib.reason(code) if code else None
            if error is None and copies.after:
                copy_all(copies.after)
        except Exception as problem:
            raise self.failure(describe(), problem) from problem
        finally:
            if timer is not None:
                timer.cancel()
        if error is not None:
            raise self.failure(describe(), error)

    def _queue(self, name, call, result, copies, held, limit):
        """Queues a call. The caller has the turn."""
        work = Work(lambda: f"{name} on {self._where()}", result)
        work.indirect = copies.tensors()
        timer = self._watch(work.describe, limit)
        problems = []

        def begins(_error):
            # Nothing may leave a function that C calls.
            try:
                copy_all(copies.before)
            except Exception as problem:
                problems.append(problem)

        def ended(error, _held=(held, memory_of(held))):
            if timer is not None:
                timer.cancel()
            try:
                if error is None:
                    copy_all(copies.after)
                else:
                    problems.append(error)
            except Exception as problem:
                problems.append(problem)
            failure = self.failure(work.describe(), problems[0]) if problems else None
            if failure is not None:
                self._remember_failure(work, failure)
            self._inflight.discard(work)
            work.finish(failure)

        self._inflight.add(work)
        try:
            if copies.before:
                self._stream.call(begins)
            code = call(self._stream.handle)
            if code:
                raise RuntimeError(_lib.reason(code))
            self._stream.call(ended)
        except Exception as problem:
            self._inflight.discard(work)
            if timer is not None:
                timer.cancel()
            raise self.failure(work.describe(), problem) from problem
        return work

    def _watch(self, describe, limit):
        """A timer that ends the communicator's calls when one has taken longer than a limit of its own."""
        seconds = self._timeout if limit is None else limit.total_seconds()
        if seconds == self._limit or seconds <= 0:
            return None

        def expire():
            self._failure = f"{describe()} has not ended within {seconds:g} s"
            _c.ncclCommRevoke(self._comm, 0)

        return after(seconds, expire)

    # Coalescing.

    def start_coalescing(self, device=None):
        self._check("coalescing")
        self._batches[threading.get_ident()] = Batch()

    def end_coalescing(self, device=None):
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            self._refuse("coalescing", "has not begun, or a call since was refused", RuntimeError)
        works = [post() for post in batch.messages]
        if batch.parts or not works:
            name, parts = "coalesced calls", batch.parts
            with self._turn:
                self._check(name)
                works.append(
                    self._queue(
                        name,
                        lambda stream: grouped(parts, stream),
                        batch.results,
                        batch.copies,
                        batch.held,
                        None,
                    )
                )
        return works[0] if len(works) == 1 else All(works)

    # Messages.

    def send(self, tensors, target, tag):
        return self._message("send", tensors, target, tag)

    def recv(self, tensors, source, tag):
        return self._message("recv", tensors, source, tag)

    def _message(self, kind, tensors, peer, tag):
        tensor = self._one(kind, tensors)
        self._check(kind, tensor)
        if not 0 <= peer < self._size:
            self._refuse(kind, f"{peer} is not a rank of this group")
        if tag < 0:
            self._refuse(kind, f"the tag {tag} is negative")

        def post():
            return self._post(kind, tensors, tensor, peer, tag)

        batch = self._batch()
        if batch is not None:
            batch.messages.append(post)
            return None
        return post()

    def _post(self, kind, tensors, tensor, peer, tag):
        to = "to" if kind == "send" else "from"
        if self._failed:
            self._forget_failures(tensors)
        work = Message(lambda: f"{kind} {to} rank {peer}, tag {tag}, on {self._where()}", tensors, self)
        if kind == "send":
            self._messages.send(tensor if is_plain(tensor) else tensor.detach().clone().contiguous(), peer, tag, work)
        elif is_plain(tensor):
            self._messages.recv(tensor, peer, tag, work)
        else:
            plain = torch.empty(tensor.shape, dtype=tensor.dtype)
            work.before_end = lambda: copy_all([(tensor, plain)])
            self._messages.recv(plain, peer, tag, work)
        return work

    def recv_anysource(self, tensors, tag):
        self._refuse("recv", "receiving from any rank is not supported; name the source", NotImplementedError)

    # Barriers of another kind.

    def monitored_barrier(self, opts, wait_all_ranks=False):
        """Waits for all ranks, by the store; rank 0 names those that do not come in time."""
        self._check("monitored_barrier")
        seconds = opts.timeout.total_seconds() if opts.timeout > _ZERO else self._timeout
        self._barriers += 1
        try:
            self._monitored_barrier(f"monitored_barrier/{self._barriers}", min(seconds, LONGEST), wait_all_ranks)
        except RuntimeError as error:
            # The store's own do not say which call.
            if str(error).startswith("strata: "):
                raise
            raise self.failure(f"monitored_barrier on {self._where()}", error) from error

    def _monitored_barrier(self, prefix, seconds, wait_all_ranks):
        deadline = time.monotonic() + seconds
        if self._rank:
            self.store.set(f"{prefix}/{self._rank}", "here")
            # Rank 0 speaks when its own time is over, which may have begun later.
            text = self._await([f"{prefix}/0"], deadline + seconds)
            verdict = "rank 0 has not answered" if text else self.store.get(f"{prefix}/0").decode()
            if verdict != "go":
                self._refuse("monitored_barrier", verdict, DistBackendError)
            return
        keys = {f"{prefix}/{rank}": rank for rank in range(1, self._size)}
        missing = [keys[key] for key in self._await(list(keys), deadline)]
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            verdict = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} did not come within {seconds:g} s"
            self.store.set(f"{prefix}/0", verdict)
            self._refuse("monitored_barrier", verdict, DistBackendError)
        self.store.set(f"{prefix}/0", "go")

    def _await(self, keys, deadline):
        """Those of the keys that nobody has set until the deadline. Asks again and again: a wait would hold the
        store's connection, which other threads use, and a rank may die meanwhile."""
        pause = 0.001
        while True:
            keys = [key for key in keys if not self.store.check([key])]
            left = deadline - time.monotonic()
            if not keys or left <= 0:
                return keys
            lost = self.lost()
            if lost is not None:
                raise RuntimeError(lost)
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)

    # Limits and ends.

    def set_timeout(self, timeout):
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def get_error(self):
        return ErrorType.SUCCESS if self._failure is None else ErrorType.COMM_ERROR

    def _get_sequence_number_for_group(self):
        return self._sequence

    def _set_sequence_number_for_group(self):
        """Every rank counts from 0."""

    def abort(self):
        """Ends all calls at once, also those that another thread's `shutdown` waits for."""
        with self._ending:
            comm, self._comm, self._leaving = self._comm or self._leaving, None, None
        if comm is None:
            return
        _groups.discard(self)
        self._failure = self._failure or "the group has been aborted"
        _c.ncclCommAbort(comm)
        self._messages.close(abort=True)
        self._stream.close()

    def shutdown(self):
        """Waits for what other threads call and for what is queued, and leaves."""
        with self._turn:
            with self._ending:
                comm, self._comm = self._comm, None
                if comm is None:
                    return
                self._leaving = comm
            _groups.discard(self)
            _c.strataStreamSynchronize(self._stream.handle)
            _c.ncclCommFinalize(comm)
            with self._ending:
                comm, self._leaving = self._leaving, None
            if comm is not None:
                _c.ncclCommDestroy(comm)
                self._messages.close(abort=False)
                self._stream.close()

    def leave(self, deadline):
        """The interpreter ends: what is under way may end until the deadline, then it is aborted."""

        def is_busy():
            return self._inflight or self._posted

        while is_busy() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not is_busy() and self._turn.acquire(timeout=max(0, deadline - time.monotonic())):
            self.shutdown()
            self._turn.release()
        else:
            self.abort()
        while is_busy() and time.monotonic() < deadline + _EXIT_SECONDS:
            time.sleep(0.001)

    def forget(self):
        """This process is a fork of the one that has the group."""
        self._failure = "the group belongs to the process that forked this one"
        self._comm = None
        self._ending, self._turn = threading.RLock(), threading.RLock()
        self._inflight, self._posted, self._failed = set(), set(), []


class Message(Work):
    """A message that has been posted; it is among those of its group until it has ended."""

    def __init__(self, describe, tensors, group):
        super().__init__(describe, tensors)
        # Its tensor is in no operation before its peer has come to it, and perhaps a copy is.
        self.indirect = tensors
        self.before_end = None
        self._group = group
        group._posted.add(self)

    def finish(self, error=None):
        if error is None and self.before_end is not None:
            try:
                self.before_end()
            except Exception as problem:
                error = problem
        if error is not None:
            self._group._remember_failure(self, error)
        self._group._posted.discard(self)
        super().finish(error)


class All(Work):
    """Several calls as one; the value of the Future is nothing."""

    def __init__(self, works):
        super().__init__(lambda: "a batch", [])
        self._left = len(works)
        self._first = None
        self._counting = threading.RLock()
        for work in works:
            work.then(self._one_ended)

    def _one_ended(self, error):
        with self._counting:
            self._left -= 1
            self._first = self._first or error
            last = self._left == 0
        if last:
            self.finish(self._first)


class StrataBackend(Group, Backend):
    """The backend for PyTorch 2.14 and later, which a ProcessGroup has for its devices."""

    def __init__(self, store, rank, size, timeout, name, ranks=(), comm=None, limit=None):
        Backend.__init__(self, rank, size)
        self._ranks = list(ranks) or list(range(size))
        self._parts = weakref.WeakValueDictionary()
        self._begin(store, rank, size, timeout, name, comm, limit)

    def getBackendName(self):
        return "strata"

    @property
    def options(self):
        options = Backend.Options("strata", timedelta(seconds=self._timeout))
        options.global_ranks_in_group = self._ranks
        options.group_name = self._name
        return options

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        """Whether `batch_isend_irecv` is to begin a batch, which PyTorch leaves open when it refuses one of the messages. Messages
        of one tag and direction wait for nothing else, so a batch of them gains nothing. `_coalescing_manager` does not ask."""
        return False

    def split(self, store, ranks, opts):
        """A backend of some of the ranks. All ranks of this one call, each with the ranks of its own part."""
        # PyTorch asks once for each device.
        made = self._parts.get(opts.group_name)
        if made is not None:
            return made
        mine = self._rank in ranks
        with self._turn:
            self._check("split_group")
            try:
                comm = _lib.split(self._comm, min(ranks) if mine else None, ranks.index(self._rank) if mine else 0)
            except RuntimeError as error:
                raise self.failure(f"split_group on {self._where()}", error) from error
        if not mine:
            # PyTorch 2.15 dereferences what it is given, and None ends the process.
            self._refuse("split_group", "this rank is in no part; give each rank one, or use new_group", RuntimeError)
        members = [self._ranks[rank] for rank in ranks]
        part = StrataBackend(
            store, ranks.index(self._rank), len(ranks), opts._timeout, opts.group_name, members, comm, self._limit
        )
        self._parts[opts.group_name] = part
        return part


def create(options, _backend_options=None):
    """What `init_process_group` and `new_group` call for the name "strata"."""
    kind = StrataBackend
    if OLD:
        from ._process_group import StrataProcessGroup as kind
    return kind(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )


def _leave_all():
    deadline = time.monotonic() + _EXIT_SECONDS
    for group in list(_groups):
        group.leave(deadline)
    # A thread that comes back from C++ when the interpreter has ended ends the process by an abort.
    while (_lib.is_busy() or _work.pool.is_busy()) and time.monotonic() < deadline + _EXIT_SECONDS:
        time.sleep(0.001)
    # The last one has yet to give up the interpreter's lock.
    time.sleep(0.01)


def _forget():
    """A forked child has no groups."""
    for group in list(_groups):
        group.forget()
    _groups.clear()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget)
