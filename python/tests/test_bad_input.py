"""Wrong input: an exception that names rank and call, and never a hang or the end of the process."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import ranks


class BadInput(unittest.TestCase):
    def on(self, function, *arguments, count=2, dead=(), **options):
        outcomes = ranks.run("bad_input", function, ranks=count, arguments=arguments, **options)
        for rank, outcome in enumerate(outcomes):
            if outcome.code != (7 if rank in dead else 0):
                self.fail(f"{function}{arguments}: rank {rank} ended with {outcome.code}\n{outcome.text}")

    def test_tensors_that_are_not_in_host_memory_are_refused(self):
        self.on("tensors_elsewhere")

    def test_cuda_tensors_are_refused_with_a_hint(self):
        self.on("cuda_hint")

    def test_types_and_operations_that_are_not_there_are_refused(self):
        self.on("types_and_operations")

    def test_wrong_sizes_and_counts_are_refused(self):
        self.on("sizes_and_counts")

    def test_ranks_that_differ_in_call_type_size_or_operation_are_told(self):
        for kind in ("call", "type", "size", "operation"):
            for later in (False, True):
                with self.subTest(kind=kind, later=later):
                    self.on("different_calls", kind, later)

    def test_messages_of_different_sizes_are_told(self):
        self.on("messages_of_different_sizes")

    def test_the_death_of_a_rank_is_told_within_two_seconds(self):
        for what in ("at once", "queued"):
            with self.subTest(what=what):
                self.on("death", what, count=3, dead=(1,))
        self.on("death_on_a_channel", count=3, dead=(1,))
        for what in ("send", "recv", "barrier"):
            with self.subTest(what=what):
                self.on("death_before_a_message", what, count=3, dead=(1,))

    def test_a_peer_that_never_comes_to_a_message_is_named(self):
        self.on("message_to_nobody")

    def test_splits_that_differ_are_told(self):
        for expects in ("nothing", "more"):
            with self.subTest(expects=expects):
                self.on("different_splits", expects)

    def test_factors_that_the_type_lacks_are_refused(self):
        self.on("factors")

    def test_what_pytorch_refuses_in_a_batch_does_not_keep_the_batch_open(self):
        self.on("refused_in_a_batch")

    def test_every_timeout_counts(self):
        for what in ("group", "set", "call", "queued", "wait", "message", "another message"):
            with self.subTest(what=what):
                self.on("timeouts", what)

    def test_a_destroyed_group_takes_no_calls(self):
        self.on("after_destroy")

    def test_a_program_ends_in_good_order_while_threads_are_in_pytorch(self):
        for what in ("message", "future"):
            self.on("under_way_at_the_end", what)

    def test_an_aborted_group_ends_its_calls(self):
        self.on("after_abort")

    def test_a_group_may_be_aborted_while_another_thread_waits_in_it(self):
        for what in ("call", "shutdown"):
            with self.subTest(what=what):
                self.on("abort_from_another_thread", what)


class BadSurroundings(unittest.TestCase):
    def python(self, text, **env):
        command = [sys.executable, "-c", text]
        environment = dict(ranks.environment(), **env)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def test_a_missing_library_is_named(self):
        text = "import strata._lib"
        code, output = self.python(text, STRATA_LIBRARY="/nowhere/libstrata.so")
        self.assertEqual(code, 1)
        self.assertIn("LibraryError: strata: cannot open /nowhere/libstrata.so", output)

    def test_a_library_of_another_version_is_refused(self):
        import ctypes.util

        other = ctypes.util.find_library("c")
        code, output = self.python("import strata._lib", STRATA_LIBRARY=other)
        self.assertEqual(code, 1)
        self.assertIn("is not this version's libstrata.so: it lacks strata", output)

    def fake_torch(self, text):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        package = Path(folder.name) / "torch"
        (package / "distributed").mkdir(parents=True)
        (package / "__init__.py").write_text(text)
        (package / "distributed" / "__init__.py").write_text("")
        return os.pathsep.join([folder.name, ranks.environment()["PYTHONPATH"]])

    def test_pytorch_that_is_too_old_is_refused(self):
        path = self.fake_torch("__version__ = '2.12.0+cpu'")
        code, output = self.python("import strata.torch", PYTHONPATH=path)
        self.assertEqual(code, 1)
        self.assertIn("ImportError: strata.torch needs PyTorch 2.13 or later, and this is 2.12.0+cpu", output)

    def test_standing_in_for_gloo_on_pytorch_that_is_too_old_for_that_is_refused(self):
        code, output = self.python(
            "import strata.torch; strata.torch.OLD = True; from strata.torch import __main__; __main__.stand_in()"
        )
        self.assertEqual(code, 1)
        self.assertIn('strata.torch: to stand in for "gloo" takes PyTorch 2.14 or later', output)

    def test_without_pytorch_the_package_says_so(self):
        path = self.fake_torch("raise ImportError('No module named torch')")
        code, output = self.python("import strata; import strata.torch", PYTHONPATH=path)
        self.assertEqual(code, 1)
        self.assertIn("ImportError: strata.torch needs PyTorch 2.13 or later: No module named torch", output)


if __name__ == "__main__":
    unittest.main()
