"""Programs that go on with what is final of a call under way, and training whose forward pass follows the gradients' call."""

import unittest
from pathlib import Path

import ranks
import test_training

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ccube.py"
# So that small tensors become final in many pieces.
_PIECES = {"STRATA_SEGMENT_BYTES": "4096"}
_TREES = dict(_PIECES, STRATA_ALLREDUCE_ALGO="two_trees")


class Ranges(unittest.TestCase):
    def on(self, function, *arguments, counts=(2,), dead=(), **options):
        for count in counts:
            with self.subTest(function=function, arguments=arguments, ranks=count):
                outcomes = ranks.run("chained", function, ranks=count, arguments=arguments, **options)
                for rank, outcome in enumerate(outcomes):
                    if outcome.code != (7 if rank in dead else 0):
                        self.fail(f"{function}{arguments}: rank {rank} ended with {outcome.code}\n{outcome.text}")

    def test_what_is_awaited_can_be_used_and_overwritten_while_the_call_goes_on(self):
        self.on("ranges", "one node", counts=(3,), env=_PIECES)
        self.on("ranges", "nodes", counts=(4,), env=_TREES)

    def test_waits_work_where_pytorch_checks_every_call_and_on_older_ones(self):
        self.on("ranges", "one node", env=dict(_PIECES, TORCH_DISTRIBUTED_DEBUG="DETAIL"))
        self.on("ranges", "older", env=_PIECES)

    def test_tensors_that_are_copied_and_messages_are_awaited_as_a_whole(self):
        self.on("indirect", counts=(2, 4))

    def test_a_failed_message_is_told_of_until_its_tensor_is_used_again(self):
        self.on("failed_message")

    def test_tensors_and_groups_that_are_not_followed_are_refused(self):
        self.on("refused")

    def test_a_wait_ends_with_an_error_where_its_call_does(self):
        for what in ("before", "abort", "shutdown", "limit"):
            self.on("ends", what)
        self.on("ends", "death", dead=(1,))

    def test_a_chain_learns_bit_by_bit_what_the_same_call_learns_without(self):
        self.on("alike", "strata", "plain", counts=(3,), env=_PIECES)
        self.on("alike", "strata", "nodes", counts=(4,), env=_TREES)

    def test_a_chain_takes_shared_parameters_bucket_views_and_accumulated_gradients(self):
        for kind in ("shared", "views", "accumulated"):
            self.on("alike", "strata", kind, env=_PIECES)

    def test_a_chain_over_gloo_waits_for_the_whole_call(self):
        self.on("alike", "gloo", "plain", counts=(4,))

    def test_a_forward_pass_after_a_failed_call_raises(self):
        self.on("chain_of_a_dead_group", dead=(1,))

    def test_a_layer_that_a_chain_has_not_seen_is_named(self):
        self.on("unused_layer")

    def test_the_example_runs_on_strata_and_on_gloo(self):
        for backend in ("strata", "gloo"):
            sizes = ["--steps", 4, "--layers", 3, "--width", 64, "--batch", 4]
            text = test_training.start(2, _EXAMPLE, "--backend", backend, *sizes)
            self.assertIn("2 ranks, 4 steps; chain and whole give the same losses bit for bit", text)


if __name__ == "__main__":
    unittest.main()
