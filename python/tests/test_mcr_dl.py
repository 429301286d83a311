"""mcr_dl: every function's every result byte, on 1, 2, 3 and 5 ranks; order, handles, backends, bad input; DeepSpeed through it."""

import unittest

import ranks


class Functions(unittest.TestCase):
    def on(self, function, counts=(1, 2, 3, 5), module="mcr_calls", **options):
        for count in counts:
            with self.subTest(ranks=count):
                ranks.passes(self, module, function, ranks=count, **options)

    def test_reductions_are_right_in_every_type_and_operation(self):
        self.on("reductions")

    def test_averages_and_reductions_of_bool_and_complex_numbers_are_right(self):
        self.on("special_reductions")

    def test_what_is_moved_in_equal_blocks_and_messages_arrives_in_every_type(self):
        self.on("moves")

    def test_blocks_of_different_and_no_size_arrive_where_they_are_placed(self):
        self.on("vectored")
