"""The process group for PyTorch before 2.14, whose own ProcessGroup takes no backend that is written in Python.

PyTorch knows it by the methods that it overrides. What PyTorch asks a backend for does not get here: `split_group` and
`monitored_barrier` raise PyTorch's own errors, and a group is of Strata for all devices.
"""

from torch.distributed import ProcessGroup

from ._group import Group


class StrataProcessGroup(Group, ProcessGroup):
    """A group of its own, in the place of PyTorch's."""

    def __init__(self, store, rank, size, timeout, name, _ranks=()):
        ProcessGroup.__init__(self, rank, size)
        self._description = ""
        self._begin(store, rank, size, timeout, name)

    def getBackendName(self):
        return "strata"

    # PyTorch's own class asks its backends for these.

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def getGroupDesc(self):
        return self._description

    def setGroupDesc(self, description):
        self._description = description

    def _start_coalescing(self, device=None):
        self.start_coalescing(device)

    def _end_coalescing(self, device=None):
        return self.end_coalescing(device)
