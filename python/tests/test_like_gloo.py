"""Strata's results are gloo's. TEST_SEED in the environment repeats a run's seed; the seed is printed."""

import os
import random
import unittest

import ranks

SEED = int(os.environ.get("TEST_SEED", random.randrange(1 << 20)))


class LikeGloo(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        print(f"TEST_SEED={SEED}")

    def both(self, function, **options):
        for count in (2, 4):
            with self.subTest(ranks=count):
                outcomes = ranks.passes(
                    self, "like_gloo", function, ranks=count, limit=200, arguments=[SEED], **options
                )
                print(f"{function}, {count} ranks: {outcomes[0].text.splitlines()[-1]}")

    def test_reductions_give_what_gloo_gives(self):
        self.both("reductions")

    def test_moved_data_is_what_gloo_moves(self):
        self.both("moves")

    def test_coalesced_functional_and_object_collectives_give_what_gloo_gives(self):
        self.both("others")

    def test_all_of_it_under_distributed_debug_detail(self):
        for function in ("reductions", "moves", "others"):
            self.both(function, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


if __name__ == "__main__":
    unittest.main()
