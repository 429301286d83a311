"""The process group for PyTorch before 2.14. TEST_SEED in the environment repeats a run's seed; the seed is printed."""

import os
import random
import unittest

import ranks

SEED = int(os.environ.get("TEST_SEED", random.randrange(1 << 20)))


class OlderPyTorch(unittest.TestCase):
    def test_collectives_give_what_gloo_gives(self):
        print(f"TEST_SEED={SEED}")
        for function in ("reductions", "moves"):
            with self.subTest(function=function):
                ranks.passes(self, "older_pytorch", function, ranks=2, limit=200, arguments=[SEED])

    def test_ddp_and_fsdp2_learn_the_same_bit_by_bit(self):
        ranks.passes(self, "older_pytorch", "training", ranks=4, limit=120)


if __name__ == "__main__":
    unittest.main()
