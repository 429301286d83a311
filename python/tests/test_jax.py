"""JAX, unchanged, over libstrata_mpitrampoline.so: what it computes is what it computes over gloo.

STRATA_MPITRAMPOLINE names the library (default: beside libstrata.so). TEST_SEED repeats a run's seed; the seed is printed.
"""

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy
import ranks

SEED = int(os.environ.get("TEST_SEED", random.randrange(1 << 20)))
PROCESSES = 4
TYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128"
LIMIT = 300.0


def library() -> str:
    """The library for MPItrampoline."""
    beside = Path(ranks.environment().get("STRATA_LIBRARY", "libstrata.so")).with_name("libstrata_mpitrampoline.so")
    return os.environ.get("STRATA_MPITRAMPOLINE", str(beside))


def run(command, processes=PROCESSES, **variables):
    """Runs a program in so many processes. Their exit codes, and all that they said."""
    common = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "COORDINATOR_PORT": str(ranks.free_port()),
        "SEED": str(SEED),
        "TYPES": TYPES,
        "MPITRAMPOLINE_LIB": library(),
    }
    children = []
    with tempfile.TemporaryFile("w+") as said:
        try:
            for rank in range(processes):
                env = dict(ranks.environment(), **common, RANK=str(rank), **variables)
                children.append(
                    subprocess.Popen([sys.executable, *command], env=env, stdout=said, stderr=subprocess.STDOUT)
                )
            codes = [child.wait(LIMIT) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        said.seek(0)
        return codes, said.read()


class Jax(unittest.TestCase):
    def setUp(self):
        if importlib.util.find_spec("jax") is None:
            self.skipTest("JAX is not installed")

    def results(self, folder, implementation):
        """What each process found, by case."""
        out = f"{folder}/{implementation}"
        program = str(Path(__file__).with_name("jax_collectives.py"))
        codes, said = run([program, implementation, out])
        self.assertEqual(codes, [0] * PROCESSES, said)
        return [numpy.load(f"{out}.{rank}.npz") for rank in range(PROCESSES)]

    def test_every_collective_is_what_it_is_over_gloo(self):
        print(f"TEST_SEED={SEED}")
        compared, only_gloo, neither = 0, set(), 0
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = self.results(folder, "gloo"), self.results(folder, "mpi")
            self.assertEqual(theirs[0].files, ours[0].files)
            for rank in range(PROCESSES):
                for case in ours[rank].files:
                    expected, found = theirs[rank][case], ours[rank][case]
                    if found.dtype.kind == "U":
                        # XLA has no MPI data type for it, and asks no MPI.
                        known = "Unsupported primitive type" in str(found) or expected.dtype.kind == "U"
                        self.assertTrue(known, f"{case}: {found}")
                        only_gloo.add(next(word for word in case.split() if word in TYPES.split()))
                        neither += expected.dtype.kind == "U"
                    elif expected.dtype.kind != "U":
                        compared += 1
                        exact = expected.dtype.kind in "iub" or not case.startswith(("psum", "sum", "prod"))
                        limit = 0 if exact else 1e-2 if "float16" in case else 1e-5
                        self.assertEqual(expected.shape, found.shape, case)
                        numpy.testing.assert_allclose(found, expected, rtol=limit, atol=0, err_msg=case)
        print(f"{compared} results compared, {neither} neither has; XLA has no MPI type for: {sorted(only_gloo)}")
        self.assertGreater(compared, 500)

    def test_a_function_that_is_not_there_ends_the_program_and_says_its_name(self):
        code = "import ctypes, os; ctypes.CDLL(os.environ['MPITRAMPOLINE_LIB']).MPIABI_File_open()"
        codes, said = run(["-c", code], processes=1)
        self.assertEqual(codes, [-6], said)
        self.assertIn("strata: MPI_File_open was called, which libstrata_mpitrampoline.so does not have", said)

    def test_without_the_library_of_strata_the_program_ends_with_a_message(self):
        code = "import ctypes, os; ctypes.CDLL(os.environ['MPITRAMPOLINE_LIB']).MPIABI_Init(None, None)"
        codes, said = run(["-c", code], processes=1, STRATA_LIBRARY="/nonexistent/libstrata.so")
        self.assertEqual(codes, [1], said)
        self.assertIn("strata: MPI_Init: /nonexistent/libstrata.so: cannot open shared object file", said)


if __name__ == "__main__":
    unittest.main()
