"""Programs that go on with what is final of a call under way.

The library follows the memory that its operations use. A tensor that is copied for a call, or whose message waits for its
peer, is in no operation of the library: such a call is waited for as a whole.
"""

import contextlib

import torch
import torch.distributed as dist

from .. import _lib
from ._elements import addresses_of, is_plain, overlap, tensors_of


class Ranges:
    """The waits. The subclass has `_inflight`, `_posted`, `_failed`, `_failure`, `_check`, `_refuse`, `_batch` and `failure`."""

    def wait_range(self, tensor) -> None:
        """Waits until the tensor's memory is final in all calls under way."""
        memory = self._memory("wait_range", tensor)
        for work in self._indirect():
            if any(overlap(memory, addresses_of(used)) for used in work.indirect):
                work.wait()
        # The communicator's failures are forgotten with it, so a group that has been aborted meanwhile speaks for itself.
        error = (_lib.wait_range(memory) if memory else None) or self._failure
        self._raise_failure("wait_range", memory, error)

    def final_count(self, tensor) -> int:
        """How many of the tensor's elements, from the first on, are final."""
        memory = self._memory("final_count", tensor)
        if not is_plain(tensor):
            self._refuse("final_count", "the tensor is not contiguous")
        waiting = [addresses_of(used) for work in self._indirect() for used in work.indirect]
        known, error = _lib.final_bytes(memory) if memory else (0, None)
        self._raise_failure("final_count", memory, error or self._failure)
        begins = [max(used.start, memory.start) - memory.start for used in waiting if overlap(memory, used)]
        return min([known, *begins]) // tensor.element_size()

    def _memory(self, call, tensor):
        self._check(call, tensor)
        if self._batch() is not None:
            self._refuse(call, "the calls of a batch are made at its end", RuntimeError)
        return addresses_of(tensor)

    def _indirect(self):
        """Calls under way of which the library does not know all tensors."""
        return [work for work in (*self._inflight, *self._posted) if work.indirect]

    def _raise_failure(self, call, memory, error):
        if error is None:
            error = next((error for used, error in self._failed if overlap(memory, used)), None)
        if error is not None:
            raise self.failure(f"{call} on {self._where()}", error)

    def _remember_failure(self, work, error):
        """What failed with tensors that the library does not know of, until another call has their memory."""
        text = str(error).removeprefix("strata: ")
        self._failed += [(addresses_of(used), text) for used in work.indirect]

    def _forget_failures(self, *held):
        """A new call uses these tensors, in lists and tuples of any depth."""
        new = [addresses_of(tensor) for tensor in tensors_of(held)]
        for entry in list(self._failed):
            if any(overlap(entry[0], used) for used in new):
                # Another thread may have done so.
                with contextlib.suppress(ValueError):
                    self._failed.remove(entry)


def _own(group):
    """Strata's part of a group for CPU tensors, or None."""
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if not isinstance(group, Ranges) and isinstance(group, dist.ProcessGroup):
        try:
            group = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return None
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL.
        group = getattr(group, "wrapped_pg", group)
    return group if isinstance(group, Ranges) else None


def serves(group) -> bool:
    """Whether a group is Strata's for CPU tensors."""
    return _own(group) is not None


def group_of(call, group) -> Ranges:
    """Strata's part of a group. A group that Strata does not serve is refused: nobody follows its calls."""
    own = _own(group)
    if own is None:
        raise TypeError(f"strata: {call}: the group's calls on CPU tensors are not Strata's; wait for the call itself")
    return own
