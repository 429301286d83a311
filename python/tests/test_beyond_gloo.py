"""What Strata's group does that gloo's does not, and how it ends."""

import unittest

import ranks


class BeyondGloo(unittest.TestCase):
    def on(self, function, counts=(3,), **options):
        for count in counts:
            with self.subTest(ranks=count):
                ranks.passes(self, "beyond_gloo", function, ranks=count, **options)

    def test_lists_may_have_tensors_of_different_sizes(self):
        self.on("uneven_lists")

    def test_tensors_need_not_be_contiguous(self):
        self.on("strided_tensors")

    def test_a_tensor_that_is_conjugated_lazily_counts_as_what_it_shows(self):
        self.on("lazily_conjugated")

    def test_bool_complex_and_factors_reduce(self):
        self.on("logic_and_factors")

    def test_each_tag_and_direction_has_an_order_of_its_own(self):
        self.on("order_of_tags")

    def test_a_message_of_nothing_has_its_place_among_others(self):
        self.on("empty_messages", counts=(2,))

    def test_a_message_does_not_wait_for_a_group_that_is_being_made(self):
        self.on("message_beside_a_new_group", counts=(2,))

    def test_a_message_needs_no_third_rank(self):
        self.on("message_after_another_rank_has_left")

    def test_a_signal_s_handler_may_call_what_it_interrupts(self):
        self.on("calls_in_a_signal_handler", counts=(2,))

    def test_tensors_may_get_other_memory_while_they_are_queued(self):
        self.on("new_memory_while_queued", counts=(2,))

    def test_limits_may_be_as_long_as_python_has_them(self):
        self.on("long_limits", counts=(2,))

    def test_a_callback_may_make_calls_and_wait_for_them(self):
        self.on("futures_and_hooks")

    def test_each_thread_may_have_its_group(self):
        self.on("many_threads")

    def test_threads_may_share_a_group(self):
        self.on("threads_of_one_group")

    def test_a_group_ends_after_the_call_of_another_thread(self):
        self.on("shutdown_beside_a_call")

    def test_an_exception_drops_the_batch_it_comes_from(self):
        self.on("dropped_batch")

    def test_a_call_that_cannot_copy_its_tensors_raises_and_ends_its_limit(self):
        self.on("failed_copy")

    def test_all_tensors_may_be_gathered_in_one(self):
        self.on("gather_single")

    def test_groups_split_and_have_subgroups(self):
        self.on("splits_and_subgroups", counts=(4,))

    def test_a_rank_in_no_part_of_a_split_is_told_so(self):
        self.on("split_without_some", counts=(4,))

    def test_a_backend_may_be_named_by_device(self):
        self.on("beside_others")

    def test_a_group_may_be_made_again_after_its_end(self):
        self.on("again_after_destroy")

    def test_forked_data_loaders_leave_the_group_alone(self):
        self.on("forked_loaders")

    def test_a_forked_child_is_told_that_the_group_is_its_parents(self):
        self.on("forked_child")

    def test_the_interpreter_ends_with_calls_queued(self):
        self.on("queued_at_exit")

    def test_the_interpreter_ends_although_nobody_answers(self):
        self.on("queued_for_nobody", limit=40)

    def test_a_monitored_barrier_names_the_missing_ranks(self):
        self.on("monitored", counts=(4,))


if __name__ == "__main__":
    unittest.main()
