"""What Strata's group does that gloo's does not, and how it ends."""

import unittest

import ranks


class BeyondGloo(unittest.TestCase):
    def on(self, function, counts=(2, 4), **options):
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

    def test_a_callback_may_make_calls_and_wait_for_them(self):
        self.on("futures_and_hooks")

    def test_each_thread_may_have_its_group(self):
        self.on("many_threads")

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

    def test_the_interpreter_ends_with_calls_queued(self):
        self.on("queued_at_exit")

    def test_the_interpreter_ends_although_nobody_answers(self):
        self.on("queued_for_nobody", limit=40)

    def test_a_monitored_barrier_names_the_missing_ranks(self):
        self.on("monitored", counts=(4,))


if __name__ == "__main__":
    unittest.main()
