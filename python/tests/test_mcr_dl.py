"""mcr_dl: every function's every result byte, on 1, 2, 3 and 5 ranks; order, handles, backends, bad input; DeepSpeed through it."""

import importlib.util
import subprocess
import sys
import unittest
from pathlib import Path

import ranks
import torch
from test_training import Run

_HERE = Path(__file__).resolve().parent


class OnRanks(unittest.TestCase):
    def on(self, function, counts=(1, 2, 3, 5), module="mcr_calls", **options):
        for count in counts:
            with self.subTest(ranks=count):
                ranks.passes(self, module, function, ranks=count, **options)


class Functions(OnRanks):
    def test_reductions_are_right_in_every_type_and_operation(self):
        self.on("reductions")

    def test_averages_and_reductions_of_bool_and_complex_numbers_are_right(self):
        self.on("special_reductions")

    def test_what_is_moved_in_equal_blocks_and_messages_arrives_in_every_type(self):
        self.on("moves")

    def test_blocks_of_different_and_no_size_arrive_where_they_are_placed(self):
        self.on("vectored")

    def test_calls_that_are_made_again_are_right_whatever_the_tensors_hold_by_then(self):
        self.on("repeated", (1, 2, 3))


class Order(OnRanks):
    def order(self, function, counts=(2, 3), **options):
        self.on(function, counts, "mcr_order", **options)

    def test_ranks_that_call_on_backends_in_opposite_orders_do_not_wait_for_each_other(self):
        for nodes, counts in (({}, (2, 3)), ({"MCR_NODES": "2"}, (2, 5))):
            self.order("opposite_orders", counts, env=nodes, limit=120)
            self.order("opposite_orders_that_wait", (3,), env=nodes)

    def test_a_call_that_waits_for_a_late_rank_holds_up_none_by_another_backend(self):
        self.order("one_backend_beside_another")

    def test_calls_of_one_backend_follow_each_other_queued_or_not(self):
        self.order("order_of_one_backend")

    def test_handles_and_tensors_may_be_dropped(self):
        self.order("dropped_handles", (1, 2))

    def test_backends_are_made_added_and_ended_by_name(self):
        self.order("backends", (1, 3))

    def test_some_of_the_ranks_may_have_a_world_of_their_own(self):
        self.order("parts_of_the_ranks", (3,), env={"MCR_PORT": str(ranks.free_port())})

    def test_a_tensor_that_has_changed_is_not_taken_for_what_it_was(self):
        self.order("changed_tensors", (1, 2))

    def test_what_is_kept_for_a_tensor_fits_no_other(self):
        self.order("what_fits", (1,))

    def test_more_calls_than_are_kept_are_right(self):
        self.order("many_kept_calls", (2,))

    def test_tensors_of_lists_may_lie_far_apart_and_among_each_other(self):
        self.order("far_tensors", (1, 3))

    def test_a_program_may_end_without_finalize(self):
        self.order("left_behind", (2,))
        self.order("left_waiting", (2,), limit=30)

    def test_each_backend_may_have_a_thread(self):
        self.order("threads", (2,))

    def test_a_forked_child_has_no_backends(self):
        self.order("forked_child", (2,))


class BadInput(OnRanks):
    def bad(self, function, *arguments, counts=(2,), dead=(), **options):
        for count in counts:
            outcomes = ranks.run("mcr_bad_input", function, ranks=count, arguments=arguments, **options)
            for rank, outcome in enumerate(outcomes):
                if outcome.code != (7 if rank in dead else 0):
                    self.fail(f"{function}{arguments}: rank {rank} of {count} ended with {outcome.code}\n{outcome.text}")

    def test_unknown_names_operations_roots_and_peers_are_told_with_what_there_is(self):
        self.bad("names_and_arguments", counts=(1, 2, 3), env={"MCR_NODES": "3"})

    def test_ranks_that_name_different_backends_are_told(self):
        self.bad("different_names", counts=(2, 3), limit=60)

    def test_what_is_no_contiguous_tensor_of_a_type_that_can_be_taken_is_refused(self):
        self.bad("tensors", counts=(1, 2))

    def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(self):
        self.bad("sizes", counts=(1, 2, 3))

    def test_ranks_that_differ_in_call_type_size_operation_or_counts_are_told(self):
        for kind in ("call", "type", "size", "operation", "counts"):
            for later in (False, True):
                with self.subTest(kind=kind, later=later):
                    self.bad("different_calls", kind, later)

    def test_the_death_of_a_rank_is_told(self):
        for later in (False, True):
            with self.subTest(later=later):
                self.bad("death", later, counts=(3,), dead=(1,))

    def test_a_backend_whose_carrier_the_ranks_lack_is_refused_with_the_cause(self):
        nodes = {"MCR_NODES": "2", "STRATA_MPI_PLUGIN": "/nonexistent/plugin.so"}
        self.bad("no_carrier", counts=(2, 3), env=nodes)

    def test_a_limit_that_passes_is_told(self):
        self.bad("late_rank")


class Beside(OnRanks):
    def test_ranks_are_torch_distributed_s_where_that_is_there_whatever_its_backend(self):
        for backend in ("strata", "gloo"):
            self.on("beside_torch", (3,), "mcr_beside", arguments=(backend,))

    def test_a_program_needs_no_pytorch(self):
        """Ranks of a launcher, here this test, whose processes have NumPy alone."""
        port, processes = ranks.free_port(), []
        for rank in range(3):
            place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            line = [sys.executable, str(_HERE / "mcr_numpy.py")]
            process = subprocess.Popen(line, env=dict(ranks.environment(), **place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append(process)
        try:
            said = [process.communicate(timeout=60 * ranks.PATIENCE)[0].decode() for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            self.assertEqual(process.returncode, 0, said)
            self.assertIn(f"rank {rank} of 3 without PyTorch", said[rank])


class DeepSpeed(OnRanks):
    def learns(self, script, ways, count):
        """Fails unless losses and parameters are those of the same script over torch.distributed, bit by bit; the calls by mcr_dl."""
        theirs, mine = (Run(count, script, backend, ways) for backend in ("strata", "mcr_dl"))
        for way in [f"zero{stage}" for stage in ways] or ["moe"]:
            for rank, (one, other) in enumerate(zip(mine.of(way), theirs.of(way), strict=True)):
                self.assertEqual(one["losses"], other["losses"], f"{way}, rank {rank}")
                self.assertEqual(one["parameters"].keys(), other["parameters"].keys())
                for name, tensor in one["parameters"].items():
                    self.assertTrue(torch.equal(tensor, other["parameters"][name]), f"{way}, rank {rank}: {name}")
        return mine.of("calls")

    def is_there(self):
        if importlib.util.find_spec("deepspeed") is None:
            print("SKIPPED: DeepSpeed is not installed", flush=True)
            return False
        return True

    def test_zero_learns_by_mcr_dl_what_it_learns_by_torch_distributed(self):
        if self.is_there():
            for calls in self.learns("zero.py", ["2", "3"], 3):
                self.assertGreater(calls["all_gather_into_tensor", "gloo"], 10)
                self.assertGreater(calls["all_reduce", "nccl"], 10)
                self.assertGreater(calls["reduce_scatter_tensor", "auto"], 5)

    def test_a_mixture_of_experts_learns_the_same_with_its_all_to_alls_by_another_backend(self):
        if self.is_there():
            for calls in self.learns("moe.py", [], 3):
                self.assertGreater(calls["all_to_all_single", "gloo"], 10)

    def test_every_collective_of_deepspeed_is_right_in_all_and_in_some_of_the_ranks(self):
        if self.is_there():
            self.on("deepspeed_collectives", (4,), "mcr_beside", limit=120)

    def test_routes_that_name_nothing_are_told_with_the_nearest_name(self):
        if self.is_there():
            self.on("deepspeed_bad_routes", (1,), "mcr_beside")
