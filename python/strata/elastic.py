"""A sampler that keeps the global batch when ranks are lost. It imports nothing but Python's own modules.

All ranks go through the same order of samples in global batches of one size. Each batch is divided among the members, the ranks
that are there; after a loss the samples of the lost ranks are divided among the others, so each global batch has the same
samples as without a loss.

    sampler = ElasticSampler(len(data), batch_size=512, rank=rank, members=world_size, seed=7)
    batches = sampler.batches()
    on_change(lambda: sampler.follow(state()))          # strataCommOnChange, strataCommState
    calls = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, part in enumerate(DataLoader(data, batch_sampler=batches)):
            sums, calls = all_reduce(gradients(part)), calls + 1
            while (rest := batches.rest(calls)) is not None:    # what ranks that were lost had of this batch, divided
                sums, calls = sums + all_reduce(gradients([data[index] for index in rest])), calls + 1
            update(sums / sampler.batch_size(step))

Every collective of the communicator counts as a call, and each part, or rest, is reduced in one.

Ranks hear of a loss in the same call or in two that follow each other: one may have the result of a call, which has the lost
rank's part in it, and hear of the loss in the next one, while another hears of it at that call's end. So what is heard holds from
a call on, which is the same for all (`first_call` of strataCommState), and not from the moment at which it is heard.

`sampler` itself is an iterable of indices, for loops that do not ask for batches.
"""

import json
import random
from collections import deque

__all__ = ["ElasticBatches", "ElasticSampler"]


class _Portion:
    """Samples that were divided among some members, and are done but for those of members that are lost meanwhile."""

    def __init__(self, samples, members):
        self.samples, self.members = samples, members

    def missing(self, members):
        """What members that are no more had of it, as a portion of those that are left; None where there are none lost."""
        if members is self.members:
            return None
        there = set(members)
        lost = {at for at, rank in enumerate(self.members) if rank not in there}
        if not lost:
            return None
        left = tuple(rank for rank in self.members if rank in there)
        return _Portion([sample for at, sample in enumerate(self.samples) if at % len(self.members) in lost], left)

    def of(self, rank):
        """A rank's part: every so many-th."""
        return self.samples[self.members.index(rank) :: len(self.members)]


class ElasticSampler:
    """The indices of this rank's samples, batch by batch.

    `data` is a number of samples or anything with a length; `batch_size` that of the global batch; `members` the ranks that
    take part, or their number. All ranks give the same `data`, `batch_size`, `seed` and `drop_last`, and the same members
    between the same batches.

    As an iterable it looks for changed members when the next index is asked for: a rank that has had its last index of a batch
    gets its part of what lost ranks had of that batch, and then the next batch. So it must not be read ahead; `batches` may be.
    """

    def __init__(self, data, batch_size, *, rank, members, shuffle=True, seed=0, drop_last=False):
        self._length = data if isinstance(data, int) else len(data)
        if self._length < 0 or batch_size < 1:
            raise ValueError(f"{self._length} samples in batches of {batch_size}: the first must be at least 0, the second 1")
        self.global_batch_size, self.rank = batch_size, rank
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._order_of, self._order = None, ()
        self.epoch, self.batch, self._first = 0, 0, 0
        self._members, self._coming = (), []
        self.set_members(members)

    @property
    def members(self):
        """The ranks that divide the batches, in order."""
        return list(self._members)

    def _checked(self, members):
        members = range(members) if isinstance(members, int) else sorted(members)
        if len(set(members)) != len(members):
            raise ValueError(f"a member stands twice in {members}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not among the members {list(members)}")
        return tuple(members)

    def set_members(self, members):
        """Who takes part from now on: ranks in any order, or how many there are. For programs that make a new communicator, at the
        same place between calls on every rank."""
        members = self._checked(members)
        self._coming.clear()
        if members != self._members:
            self._members = members

    def follow(self, state):
        """Takes the members of a new generation from the text that strataCommState writes: for the function of
        strataCommOnChange, each time it is called. They hold when the first call of that generation has ended (`ended`)."""
        state = json.loads(state)
        if not isinstance(state.get("members"), list) or not isinstance(state.get("first_call"), int):
            raise ValueError(f"no members or no first_call in the state of a communicator: {state}")
        self._coming.append((state["first_call"], self._checked(state["members"])))

    def ended(self, calls):
        """So many collectives of the communicator have ended on this rank."""
        while self._coming and self._coming[0][0] <= calls:
            self._members = self._coming.pop(0)[1]

    def set_epoch(self, epoch, batch=0):
        """The epoch, which has an order of its own, and where in it the next iteration begins: `epoch` and `batch` of another rank
        for one that comes later. `batch` is the number of the batch that is asked for next."""
        self.epoch, self.batch, self._first = epoch, batch, batch

    def __len__(self):
        """This rank's samples in an epoch if the members stay."""
        nbatches, place, members = self._nbatches(), self._members.index(self.rank), len(self._members)
        last = self.batch_size(nbatches - 1) if nbatches else 0
        whole = len(range(place, self.global_batch_size, members))
        return whole * max(nbatches - 1, 0) + len(range(place, last, members))

    def _nbatches(self):
        whole, rest = divmod(self._length, self.global_batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def batch_size(self, batch):
        """How many samples a global batch has: as many as all others, but for the last one."""
        return min(self.global_batch_size, self._length - batch * self.global_batch_size)

    def global_batch(self, batch):
        """The samples of a global batch of this epoch, whoever has them."""
        if self._order_of != self.epoch:
            order = list(range(self._length))
            if self._shuffle:
                random.Random(f"{self._seed} {self.epoch}").shuffle(order)
            self._order_of, self._order = self.epoch, order
        first = batch * self.global_batch_size
        return self._order[first : first + self.global_batch_size]

    def _portions(self):
        """Each batch of the epoch, divided among the members of the moment at which it is asked for."""
        first, self._first = self._first, 0
        for batch in range(first, self._nbatches()):
            self.batch = batch + 1
            yield _Portion(self.global_batch(batch), self._members)

    def __iter__(self):
        for portion in self._portions():
            while portion is not None:
                yield from portion.of(self.rank)
                portion = portion.missing(self._members)

    def batches(self):
        """The same as lists, one for each global batch: a `batch_sampler` for a DataLoader."""
        return ElasticBatches(self)


class ElasticBatches:
    """This rank's parts of the global batches, as lists of indices. It may be read ahead, as a DataLoader with workers does, equally
    far on all ranks.

    A part is empty where a batch has fewer samples than there are members. It is given all the same, since all ranks make the
    same calls: with a DataLoader `collate_fn` has to take it, or `drop_last` leaves such a batch out.
    """

    def __init__(self, sampler):
        self.sampler = sampler
        self._given = deque()

    def __len__(self):
        return self.sampler._nbatches()

    def __iter__(self):
        self._given.clear()
        for portion in self.sampler._portions():
            self._given.append(portion)
            yield portion.of(self.sampler.rank)

    def rest(self, calls=None):
        """To be asked when a part, or a rest, has been reduced with those of the others, by all members alike. `calls` is how many
        collectives of the communicator have ended; it is left out with `set_members`. If members were lost before that reduction:
        this rank's part of what they had of it, which may be empty; the others have theirs. None: the batch is whole.
        """
        if calls is not None:
            self.sampler.ended(calls)
        if not self._given:
            raise RuntimeError("no batch is under way: rest() is asked after each part")
        missing = self._given[0].missing(self.sampler._members)
        if missing is None:
            self._given.popleft()
            return None
        self._given[0] = missing
        return missing.of(self.sampler.rank)
