"""The sampler that keeps the global batch: whoever is lost and whenever, each global batch has the samples that it has without
a loss. Ranks are objects here, which are told of losses as strataCommOnChange tells them, or processes that are killed."""

import itertools
import json
import os
import random
import subprocess
import sys
import unittest
from pathlib import Path

import ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from strata.elastic import ElasticSampler  # noqa: E402


def samplers(count, length, batch_size, **options):
    return {rank: ElasticSampler(length, batch_size, rank=rank, members=count, **options) for rank in range(count)}


def lose(group, lost):
    """Takes ranks away and tells the others."""
    for rank in lost:
        del group[rank]
    for sampler in group.values():
        sampler.set_members(list(group))


class World:
    """Ranks that reduce, and are lost meanwhile. `losses` has, by the number of the call, ranks and whether the call has their
    part. If it has, the others hear of the loss at its end or in the next call, as `chance` decides, and the first call without
    the rank is the next one."""

    def __init__(self, group, losses, chance):
        self.group, self.losses, self.chance, self.calls = group, losses, chance, 0
        self.late = []

    def hear(self, rank, state):
        if rank in self.group:
            self.group[rank].follow(state)

    def lose(self, ranks, first_call):
        for rank in ranks:
            del self.group[rank]
        return json.dumps({"members": sorted(self.group), "first_call": first_call}) if ranks else None

    def reduce(self, parts):
        self.calls += 1
        late, self.late = self.late, []
        for rank, state in late:
            self.hear(rank, state)
        here = [(rank, counts) for rank, counts in self.losses.get(self.calls, []) if rank in self.group]
        state = self.lose([rank for rank, counts in here if not counts], self.calls)
        for rank in self.group if state else ():
            self.hear(rank, state)
        samples = [sample for rank in self.group for sample in parts[rank]]
        state = self.lose([rank for rank, counts in here if counts], self.calls + 1)
        for rank in self.group if state else ():
            if self.chance.random() < 0.5:
                self.hear(rank, state)
            else:
                self.late.append((rank, state))
        return samples


def trained(nranks, length, batch_size, losses, ahead=0, seed=3):
    """Trains an epoch by batches. Each loader is `ahead` batches ahead. The samples of each global batch, as they were reduced."""
    group = samplers(nranks, length, batch_size, seed=seed)
    batches = {rank: sampler.batches() for rank, sampler in group.items()}
    loaders = {rank: iter(batches[rank]) for rank in group}
    read = {rank: list(itertools.islice(loader, ahead)) for rank, loader in loaders.items()}
    world, whole = World(group, losses, random.Random(length)), []
    for _ in range(len(batches[0])):
        for rank in group:
            read[rank].extend(itertools.islice(loaders[rank], 1))
        samples = world.reduce({rank: read[rank].pop(0) for rank in group})
        while True:
            rests = {rank: batches[rank].rest(world.calls) for rank in group}
            if None in rests.values():
                assert set(map(type, rests.values())) == {type(None)}, "all ranks go on alike"
                break
            samples += world.reduce(rests)
        whole.append(samples)
    assert all(next(loaders[rank], None) is None for rank in group), "the epoch has ended on all"
    return whole


class Batches(unittest.TestCase):
    def expected(self, length, batch_size, seed=3):
        one = ElasticSampler(length, batch_size, rank=0, members=1, seed=seed)
        return [sorted(one.global_batch(batch)) for batch in range(len(one.batches()))]

    def same(self, whole, length, batch_size):
        self.assertEqual([sorted(batch) for batch in whole], self.expected(length, batch_size))

    def test_without_a_loss_the_ranks_divide_each_batch(self):
        self.same(trained(4, 103, 20, {}), 103, 20)

    def test_what_lost_ranks_had_of_the_batch_and_of_later_ones_is_divided(self):
        self.same(trained(4, 103, 20, {2: [(1, False)]}), 103, 20)
        self.same(trained(4, 103, 20, {1: [(0, False), (3, False)], 3: [(1, False)]}), 103, 20)

    def test_a_rank_lost_with_a_rest_has_had_its_part_of_the_batch(self):
        # Call 2 is that of the rest of the first batch.
        self.same(trained(4, 60, 20, {1: [(2, False)], 2: [(1, False)], 3: [(3, False)]}), 60, 20)

    def test_ranks_that_hear_of_a_loss_in_different_calls_divide_alike(self):
        for length in range(60, 80):
            self.same(trained(4, length, 20, {1: [(2, True)], 2: [(1, True)]}), length, 20)

    def test_loaders_that_read_ahead_have_given_parts_by_the_members_of_before(self):
        for ahead in (1, 2, 5, 9):
            self.same(trained(4, 103, 20, {1: [(3, True)], 4: [(0, False)]}, ahead=ahead), 103, 20)

    def test_any_losses_at_any_time(self):
        chance = random.Random(5)
        for _ in range(300):
            nranks, length, size = chance.randint(1, 6), chance.randint(0, 60), chance.randint(1, 17)
            losses = {}
            for rank in chance.sample(range(nranks), chance.randint(0, nranks - 1)):
                losses.setdefault(chance.randint(1, 12), []).append((rank, chance.random() < 0.5))
            with self.subTest(nranks=nranks, length=length, size=size, losses=losses):
                self.same(trained(nranks, length, size, losses, ahead=chance.randint(0, 3)), length, size)

    def test_a_rest_is_asked_for_after_a_part(self):
        batches = ElasticSampler(10, 5, rank=0, members=2).batches()
        with self.assertRaisesRegex(RuntimeError, "no batch is under way"):
            batches.rest()

    def test_a_rank_that_comes_later_goes_on_with_the_others(self):
        group = samplers(3, 60, 12)
        first = {rank: iter(sampler.batches()) for rank, sampler in group.items()}
        for loader in first.values():
            next(loader)
        lose(group, [1])
        for rank in (0, 2):
            next(first[rank])
            group[rank].set_members(3)
        back = ElasticSampler(60, 12, rank=1, members=3)
        back.set_epoch(group[0].epoch, group[0].batch)
        parts = [next(first[0]), next(iter(back.batches())), next(first[2])]
        self.assertEqual(sorted(sum(parts, [])), sorted(back.global_batch(2)))


class Indices(unittest.TestCase):
    def test_the_iterable_gives_what_was_lost_of_its_batch_before_the_next_one(self):
        group = samplers(3, 24, 12, shuffle=False)
        given = {rank: iter(sampler) for rank, sampler in group.items()}
        first = [list(itertools.islice(given[rank], 4)) for rank in group]
        self.assertEqual(first, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]])
        lose(group, [1])
        self.assertEqual(list(given[0]), [1, 7, 12, 14, 16, 18, 20, 22])
        self.assertEqual(list(given[2]), [4, 10, 13, 15, 17, 19, 21, 23])

    def test_lengths_are_those_of_what_is_given(self):
        for nranks, length, size, drop in itertools.product((1, 3, 4), (0, 1, 20, 23), (1, 5, 30), (False, True)):
            for rank, sampler in samplers(nranks, length, size, drop_last=drop).items():
                self.assertEqual(len(sampler), len(list(sampler)), (nranks, rank, length, size, drop))
                self.assertEqual(len(sampler.batches()), len(list(sampler.batches())))

    def test_epochs_have_orders_of_their_own_and_the_same_on_every_rank(self):
        one, other = ElasticSampler(50, 50, rank=0, members=1, seed=1), ElasticSampler(50, 50, rank=4, members=[4], seed=1)
        first = list(one)
        self.assertEqual(first, list(other))
        self.assertEqual(first, list(one), "an epoch again is the same")
        one.set_epoch(1)
        self.assertNotEqual(first, list(one))
        self.assertNotEqual(first, list(ElasticSampler(50, 50, rank=0, members=1, seed=2)))
        self.assertEqual(sorted(first), list(range(50)))

    def test_members_that_cannot_be_are_refused(self):
        sampler = ElasticSampler(range(10), 5, rank=1, members=[3, 1])
        self.assertEqual(sampler.members, [1, 3])
        with self.assertRaisesRegex(ValueError, r"rank 1 is not among the members \[0, 2\]"):
            sampler.set_members([0, 2])
        with self.assertRaisesRegex(ValueError, "stands twice"):
            sampler.set_members([1, 1])
        with self.assertRaisesRegex(ValueError, "in batches of 0"):
            ElasticSampler(10, 0, rank=0, members=1)
        self.assertEqual(sampler.members, [1, 3])

    def test_what_a_communicator_s_state_says_holds_from_its_first_call_on(self):
        sampler = ElasticSampler(10, 5, rank=1, members=4)
        sampler.follow('{"generation":1,"ranks":4,"members":[0,1,3],"first_call":7,"calls":6,"lost":[]}')
        sampler.follow(b'{"members":[1,3],"first_call":8}')
        held = []
        for calls in (6, 7, 8):
            sampler.ended(calls)
            held.append(sampler.members)
        self.assertEqual(held, [[0, 1, 2, 3], [0, 1, 3], [1, 3]])
        with self.assertRaisesRegex(ValueError, "no members or no first_call"):
            sampler.follow('{"members":[1]}')
        with self.assertRaisesRegex(ValueError, "rank 1 is not among"):
            sampler.follow('{"members":[0],"first_call":9}')


class Communicator(unittest.TestCase):
    def run_ranks(self, nranks, samples, batch_size, losses):
        """What each rank wrote; None for one that was killed."""
        shared = {"STRATA_LOST": "continue", "NCCL_COMM_ID": f"127.0.0.1:{ranks.free_port()}", "STRATA_NCCL_LIB": "none"}
        command = [sys.executable, str(HERE / "elastic_training.py"), str(samples), str(batch_size), *losses]
        processes = []
        for rank in range(nranks):
            env = {**ranks.environment(), **shared, "RANK": str(rank), "WORLD_SIZE": str(nranks)}
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outcomes = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=60 * ranks.PATIENCE)
                self.assertIn(process.returncode, (0, -9), err)
                outcomes.append(json.loads(out) if process.returncode == 0 else None)
        finally:
            for process in processes:
                process.kill()
        return outcomes

    def test_ranks_that_are_killed_take_no_sample_with_them(self):
        if not Path(ranks.environment()["STRATA_LIBRARY"]).exists():
            self.skipTest("there is no libstrata.so")
        whole = ElasticSampler(50, 12, rank=0, members=1)
        expected = [[int(sample in whole.global_batch(batch)) for sample in range(50)] for batch in range(5)]
        for losses in ([], ["1:0"], ["2:1", "0:2"], ["3:1", "1:1"], ["0:0", "1:1", "2:5"]):
            with self.subTest(losses=losses):
                outcomes = self.run_ranks(4, 50, 12, losses)
                self.assertEqual(len([one for one in outcomes if one is None]), len(losses))
                for outcome in outcomes:
                    self.assertIn(outcome, (None, expected))


class Loader(unittest.TestCase):
    def test_a_data_loader_takes_it(self):
        try:
            from torch.utils.data import DataLoader
        except ImportError:
            self.skipTest("there is no PyTorch")
        sampler = ElasticSampler(40, 10, rank=1, members=3)
        batches = sampler.batches()
        for workers in (0, 2):
            loader = iter(DataLoader(list(range(40)), batch_sampler=batches, num_workers=workers))
            first = next(loader).tolist()
            self.assertEqual(first, sampler.global_batch(0)[1::3])
            sampler.set_members([1, 2])
            self.assertEqual(batches.rest(), sampler.global_batch(0)[0::3][0::2])
            self.assertIsNone(batches.rest())
            rest = [next(loader).tolist() + sum(iter(batches.rest, None), []) for _ in range(3)]
            self.assertEqual([len(part) for part in rest], [5, 5, 5])
            sampler.set_members(3)
            sampler.set_epoch(0)


if __name__ == "__main__":
    unittest.main()
