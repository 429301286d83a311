"""mcr_dl: every function's every result byte, on 1, 2, 3 and 5 ranks; order, handles, backends, bad input; DeepSpeed through it."""

import unittest

import ranks


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


class Order(OnRanks):
    def order(self, function, counts=(2, 3), **options):
        self.on(function, counts, "mcr_order", **options)

    def test_ranks_that_call_on_backends_in_opposite_orders_do_not_wait_for_each_other(self):
        for nodes in ({}, {"MCR_NODES": "2"}):
            self.order("opposite_orders", (2, 3, 5), env=nodes)
            self.order("opposite_orders_that_wait", (2, 3), env=nodes)

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

    def test_more_calls_than_are_kept_are_right(self):
        self.order("many_kept_calls", (2,))

    def test_tensors_of_lists_may_lie_far_apart_and_among_each_other(self):
        self.order("far_tensors", (1, 3))

    def test_a_program_may_end_without_finalize(self):
        self.order("left_behind", (2,))

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
