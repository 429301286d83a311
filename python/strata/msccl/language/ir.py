"""Names of buffers and of policies."""

from enum import Enum


class Buffer(Enum):
    """A rank's buffers; scratch buffers have names of their own beside these."""

    input = "i"
    output = "o"
    scratch = "s"

    def __str__(self):
        return self.value

    def __lt__(self, other):
        return self.value < other.value


class ThreadblockPolicy(Enum):
    """Who assigns steps to thread blocks: the compiler, or `sendtb` and `recvtb` of each step."""

    auto = "auto"
    manual = "manual"

    def __str__(self):
        return self.value
