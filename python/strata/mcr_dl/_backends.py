"""The backends of a group of ranks: which there are, how their ranks meet, and how they end.

Each backend is a communicator of its own, whose own carrier is the backend's. So each has an order of its own, for messages as
well, and ranks may call on two backends in opposite orders. "auto" is one more, of which the carriers of all are siblings:
the tuning table chooses among them.
"""

import contextlib
import ctypes
import os
import sys
import threading
from ctypes import byref, c_char, c_int, c_void_p

from .. import _lib
from ._calls import NULL, Lane, McrError, config_of, function, seconds_of
from ._memory import HOST
from ._names import AUTO, CARRIERS, is_algorithm, listed, unknown

_lib_calls = _lib.lib
_ID_BYTES = ctypes.sizeof(_lib.UniqueId)
_GPU = "cuda"
_INTER, _CARRIERS = "STRATA_INTER", "STRATA_CARRIERS"
_MOST_MS = 2**31 - 1
# What the names of all backends take, with commas between them.
_NAMES_BYTES = 64
# The environment is the process's; communicators are made one after another.
_making = threading.RLock()


class Backend:
    """What calls by one name go by."""

    __slots__ = ("name", "lane", "device", "config", "moves")

    def __init__(self, name, lane, device=None, config=(), moves=True):
        self.name = name
        # Calls in host memory, and on a GPU; None where there are none.
        self.lane = lane
        self.device = device
        # What C functions take after the stream: nothing, or options.
        self.config = config
        # Whether it has sends and receives.
        self.moves = moves

    def lanes(self) -> list:
        return [lane for lane in (self.lane, self.device) if lane is not None]


def meet_by_launcher() -> "tuple[int, int, bytes]":
    """This process's rank, how many there are, and an id: by the launcher's variables, or by torch.distributed where that is there."""
    group = _torch_group()
    if group is not None:
        return meet_by_store(*group)
    made, size, rank = _lib.UniqueId(), c_int(), c_int()
    code = function("strataGetWorldId")(byref(made), byref(size), byref(rank))
    if code:
        raise McrError(f"mcr_dl: init: {_lib.reason(code)}")
    return rank.value, size.value, bytes(made)


def _vendor_id() -> bytes:
    made = _lib.UniqueId()
    code = function("ncclGetUniqueId")(byref(made))
    if code:
        raise McrError(f"mcr_dl: init: {_lib.reason(code)}")
    return bytes(made)


def _torch_group():
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    return store, "mcr_dl", distributed.get_rank(), distributed.get_world_size()


def meet_by_store(store, name, rank, size) -> "tuple[int, int, bytes]":
    """The same by a store of torch.distributed, whose ranks `size` processes are."""
    from torch.distributed import PrefixStore

    # They may meet more than once.
    generation = (store.add(f"{name}/generation", 1) - 1) // size
    shared = PrefixStore(f"{name}/{generation}", store)
    if rank == 0:
        shared.set("unique_id", _lib.unique_id().hex())
    return rank, size, bytes.fromhex(shared.get("unique_id").decode())


@contextlib.contextmanager
def _settings(**settings):
    before = {name: os.environ.get(name) for name in settings}
    try:
        for name, value in settings.items():
            os.environ[name] = value
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Backends:
    """All backends of a group of ranks."""

    def __init__(self, meet):
        self._meet = meet
        self.rank = 0
        self.size = 0
        self.made: "dict[str, Backend]" = {}
        # Those that the program has named, in its order.
        self.named: "list[str]" = []
        self._timeout_ms = -1
        # The settings of the communicator that is "auto" alone's, if there is one.
        self._auto: "dict | None" = None

    def init(self, backends, timeout, device) -> None:
        """Makes those that are not there yet. All ranks call, with the same names."""
        if device not in (None, HOST, _GPU):
            raise ValueError(f"mcr_dl: init: device must be {HOST!r} or {_GPU!r}, not {device!r}")
        seconds = None if timeout is None else seconds_of(timeout, "init")
        names = listed(backends)
        for name in names:
            if name != AUTO and name not in CARRIERS:
                raise unknown(name, (*CARRIERS, AUTO))
        new = [name for name in names if name not in self.named]
        if not new:
            return
        self._timeout_ms = -1 if seconds is None else int(min(seconds * 1000 + 0.999, _MOST_MS))
        with _making:
            self._make(new, device)

    def _make(self, new, device) -> None:
        torch = sys.modules.get("torch")
        begun = _GPU if torch is not None and torch.cuda.is_initialized() else HOST
        on_gpu = (device or begun) == _GPU
        own = [name for name in (*self.named, *new) if name != AUTO]
        wanted = [(name, {_INTER: CARRIERS[name], _CARRIERS: AUTO}) for name in own if name not in self.made]
        auto = self._settings_of_auto(own)
        if auto is not None and auto != self._auto:
            wanted.append((AUTO, auto))
        ids = []
        if not self.made:
            self.rank, self.size, first = self._meet()
            ids.append(first)
        made = self._all(wanted, ids, on_gpu)
        old = self.made.get(AUTO) if self._auto is not None and AUTO in made else None
        self.made.update(made)
        self.named += new
        if AUTO in made:
            self._auto = auto
            self._forget_algorithms()
        elif self._auto is None:
            self.made[AUTO] = self.made[own[0]]
        if old is not None:
            self._close(old.lanes())

    def _settings_of_auto(self, own) -> "dict | None":
        """The settings with which "auto" has a communicator of its own. None: with one backend it is that one."""
        if _CARRIERS in os.environ or not own:
            return {}
        carriers = dict.fromkeys(CARRIERS[name] for name in own)
        return {_INTER: AUTO, _CARRIERS: ",".join(carriers)} if len(own) > 1 else None

    def _all(self, wanted, ids, on_gpu) -> "dict[str, Backend]":
        """Makes communicators one after another; none if one cannot be made."""
        made = {}
        try:
            for name, settings in wanted:
                if not ids:
                    ids = self._more_ids(len(wanted), made, _lib.unique_id)
                lane = Lane(name, self._communicator(name, ids.pop(0), settings), self.rank, self.size)
                made[name] = Backend(name, lane)
                if len(made) == 1:
                    self._agree(lane, [name for name, _ in wanted])
                if name != AUTO:
                    self._check(lane, CARRIERS[name])
                if on_gpu:
                    # A vendor's library knows its own ids alone.
                    (unique,) = self._more_ids(1, made, _vendor_id)
                    made[name].device = self._on_gpu(name, unique, settings)
        except Exception:
            for backend in made.values():
                for lane in backend.lanes():
                    lane.close(True)
            raise
        return made

    def _communicator(self, name, unique, setting) -> int:
        try:
            with _settings(**setting):
                return _lib.init_host(self.size, unique, self.rank, self._timeout_ms)
        except RuntimeError as error:
            raise McrError(f"mcr_dl: init of backend {name!r} on rank {self.rank} of {self.size}: {error}") from None

    def _on_gpu(self, name, unique, settings):
        """A lane on this process's GPU. In front of NCCL or RCCL what is not MPI's is that library's."""
        from ._device import DeviceLane

        if settings.get(_INTER) == "tcp" and os.environ.get("STRATA_NCCL_LIB") != "none":
            settings = {**settings, _INTER: AUTO}
        try:
            with _settings(**settings):
                return DeviceLane(name, unique, self.rank, self.size)
        except RuntimeError as error:
            where = f"on rank {self.rank} of {self.size}"
            raise McrError(f"mcr_dl: init of backend {name!r} for the GPU {where}: {error}") from None

    def _more_ids(self, count, made, new_id) -> "list[bytes]":
        """Further ids, which rank 0 makes, over a communicator that is there."""
        lane = next(iter((*made.values(), *self.made.values()))).lane
        shared = (c_char * (count * _ID_BYTES))()
        if self.rank == 0:
            shared.raw = b"".join(new_id() for _ in range(count))
        at = c_void_p(ctypes.addressof(shared))
        arguments = (at, at, ctypes.c_size_t(len(shared)), c_int(_lib.UINT8), c_int(0))
        lane.call("init", "ncclBroadcast", arguments, (), shared)
        whole = shared.raw
        return [whole[at : at + _ID_BYTES] for at in range(0, len(whole), _ID_BYTES)]

    def _agree(self, lane, names) -> None:
        """Raises ValueError where ranks have not named the same backends in one order."""
        mine = ",".join(names).encode()[:_NAMES_BYTES].ljust(_NAMES_BYTES)
        told = (c_char * (self.size * _NAMES_BYTES))()
        sent = (c_char * _NAMES_BYTES).from_buffer_copy(mine)
        places = (c_void_p(ctypes.addressof(sent)), c_void_p(ctypes.addressof(told)))
        lane.call("init", "ncclAllGather", (*places, ctypes.c_size_t(_NAMES_BYTES), c_int(_lib.UINT8)), (), (sent, told))
        whole = told.raw
        of = [whole[at : at + _NAMES_BYTES].decode().strip() for at in range(0, len(whole), _NAMES_BYTES)]
        other = next((rank for rank, named in enumerate(of) if named != of[0]), None)
        if other is not None:
            raise ValueError(f"mcr_dl: init: rank 0 makes the backends {of[0]}, rank {other} {of[other]}; all name the same in one order")

    def _check(self, lane, carrier) -> None:
        """Raises McrError where this carrier has been left out: a call of no elements tells, and moves nothing."""
        config = config_of(f"@{carrier}")
        arguments = (NULL, NULL, ctypes.c_size_t(0), c_int(_lib.UINT8), c_int(0))
        if function("ncclBroadcastConfig")(*lane.sync_arguments(arguments, (byref(config),))):
            raise McrError(
                f"mcr_dl: init on rank {self.rank} of {self.size}: backend {lane.name!r} goes by {carrier}, which cannot carry messages "
                f"between these ranks' nodes; the warning on standard error says why"
            )

    def find(self, name) -> Backend:
        """The backend of this name; ValueError where there is none."""
        backend = self.made.get(name) if isinstance(name, str) else None
        if backend is not None:
            return backend
        if not isinstance(name, str):
            raise TypeError(f"mcr_dl: a backend is given by its name, not {name!r}")
        if not self.made:
            raise McrError(f"mcr_dl: backend {name!r} is not there: mcr_dl.init has not been called, or finalize has")
        if is_algorithm(name):
            auto = self.made[AUTO]
            config = config_of(name)
            made = Backend(name, auto.lane, auto.device, (byref(config),), False)
            self.made[name] = made
            return made
        if name in CARRIERS:
            raise ValueError(f"mcr_dl: backend {name!r} has not been named to mcr_dl.init; there are {', '.join(self.made)}")
        raise unknown(name, tuple(name for name in self.made if not is_algorithm(name)))

    def lanes_of(self, backends) -> list:
        """The lanes of these backends, by default of all; each once."""
        names = list(self.made) if backends is None else listed(backends)
        lanes = [lane for name in names for lane in self.find(name).lanes()]
        return list(dict.fromkeys(lanes))

    def finalize(self, backends) -> None:
        """Ends these backends, by default all, when what is queued on them has ended. All ranks call."""
        names = list(self.made) if backends is None else listed(backends)
        ended = [self.find(name) for name in names]
        self._forget_algorithms()
        self.named = [name for name in self.named if name not in names]
        for name in names:
            self.made.pop(name, None)
        is_own = self._auto is not None
        if AUTO not in self.named and not any(name != AUTO for name in self.named) or not is_own and not self.named:
            # Nothing is left that "auto" could choose among.
            ended += self.made.values()
            self.made, self.named = {}, []
        if AUTO not in self.made:
            self._auto = None
            if self.named:
                self.made[AUTO] = self.made[next(name for name in self.named if name != AUTO)]
        kept = {lane for backend in self.made.values() for lane in backend.lanes()}
        self._close(dict.fromkeys(lane for backend in ended for lane in backend.lanes() if lane not in kept))

    def _close(self, lanes) -> None:
        """Ends lanes when what is queued on them has ended. The first error is raised when all have ended."""
        errors = []
        for lane in lanes:
            try:
                lane.synchronize()
            except McrError as error:
                errors.append(error)
            why = lane.close(False)
            if why is not None:
                errors.append(McrError(f"mcr_dl: finalize of backend {lane.name!r}: {why}"))
        if errors:
            raise errors[0]

    def _forget_algorithms(self) -> None:
        for name in [name for name in self.made if is_algorithm(name)]:
            del self.made[name]

    def abandon(self) -> None:
        """In a forked child: the communicators are the parent's."""
        self.made, self.named, self._auto = {}, [], None
