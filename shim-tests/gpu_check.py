"""scripts/gpu-check judges right: what its parts make of ranks' results, made up here, and that it ends what it starts.

Run by command/gpu.rs."""

import math
import os
import sys
import tempfile
import time
import types
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts", "gpu"))

import processes
import pytorch
import report

STRATA = ["/there/libstrata.so", "/there/libnccl.so.2"]


def check(**more):
    goals = []
    settings = {"rehearse": False, "quick": True, "library": STRATA[0], "goals": goals, "torch": {"nccl": [2, 30, 1]},
                "gpu": {"free_bytes": 64 << 30}}
    made = types.SimpleNamespace(**{**settings, **more})
    made.goal = lambda what, measured, met: goals.append((what, measured, met))
    return made


def line(text):
    return f"host:1:2 [0] STRATA INFO {text}\n"


class Parts(unittest.TestCase):
    """Every job is answered by `answers`, which gets the way and the number of ranks."""

    def judged(self, part, answers, **more):
        made = check(**more)
        self.addCleanup(setattr, pytorch, "job", pytorch.job)
        pytorch.job = lambda check, program, way, count, limit, what, per_node=1: answers(way, count)
        return part(made, 100), made.goals

    def trained(self, factor):
        def answer(way, count):
            loss = 2.0 * (factor if way is pytorch.TCP else 1.0)
            return pytorch.Job([{"DDP": [2.0, 1.0], "FSDP": [2.0, loss]}] * count, "", [""] * count, STRATA)
        return self.judged(pytorch.train, answer)[0]

    def test_equal_losses_pass_and_are_called_equal(self):
        part = self.trained(1.0)
        self.assertEqual(part.outcome, report.PASSED)
        self.assertEqual(part.text.count("equal, bit by bit"), 4)

    def test_losses_may_differ_by_so_much_and_no_more(self):
        self.assertEqual(self.trained(1 + 5e-7).outcome, report.PASSED)
        self.assertIn("5.0e-07 (allowed: 1e-06)", self.trained(1 + 5e-7).text)
        self.assertEqual(self.trained(1 + 2e-6).outcome, report.FAILED)
        self.assertEqual(self.trained(math.nan).outcome, report.FAILED)

    def captured(self, notices, right):
        def answer(way, count):
            said = line("calls on a stream that is being captured into a graph are the vendor's library's")
            logs = [said * notices if way.preload else ""] + [""] * (count - 1)
            return pytorch.Job([{"right": right, "after": True}] * count, "", logs, STRATA)
        return self.judged(pytorch.capture, answer)[0].outcome

    def test_captured_calls_are_the_vendor_s_with_one_notice(self):
        self.assertEqual(self.captured(1, [True] * 10), report.PASSED)
        self.assertEqual(self.captured(0, [True] * 10), report.FAILED)
        self.assertEqual(self.captured(2, [True] * 10), report.FAILED)
        self.assertEqual(self.captured(1, [True] * 9 + [False]), report.FAILED)

    def collected(self, slow=1.0, right=True, carried=("all_gather", "reduce_scatter", "all_reduce"), host=5.0):
        def answer(way, count):
            def row(name, rank):
                return {
                    "collective": name, "bytes": 16 << 20, "calls": 3, "min_us": 1.0, "max_us": 1e5,
                    "median_us": 1000.0 * (slow if way.preload else 1.0) + rank, "host_median_us": host,
                    "host_max_us": 9.0, "right": right or rank != 1 or not way.preload}
            names = ["all_gather", "reduce_scatter", "all_reduce"]
            calls = [{"collective": name, "median_us": host, "p99_us": 9.0} for name in names]
            results = [{"rows": [row(name, rank) for name in names], "calls": calls} for rank in range(count)]
            log = "".join(line(f"{name}: 1 element -> log, because: named") for name in carried)
            return pytorch.Job(results, "", [log] * count, STRATA)
        return self.judged(pytorch.collectives, answer)

    def test_collectives_are_compared_with_plain_nccl(self):
        part, goals = self.collected(slow=0.5)
        self.assertEqual(part.outcome, report.PASSED, part.why)
        self.assertEqual([met for _, _, met in goals], [True, True])
        # The time is the slowest rank's.
        self.assertIn("| all_gather | 16 MiB | Strata over TCP | 503 | 1 to 100000 | 1.99 |", part.text)

    def test_being_slower_than_plain_nccl_misses_the_goal_and_fails_nothing(self):
        part, goals = self.collected(slow=2.0, host=30.0)
        self.assertEqual(part.outcome, report.PASSED)
        self.assertEqual([met for _, _, met in goals], [False, False])

    def test_a_wrong_result_of_one_rank_fails(self):
        part, _ = self.collected(right=False)
        self.assertEqual(part.outcome, report.FAILED)
        self.assertIn("WRONG", part.text)

    def test_a_collective_that_strata_did_not_carry_fails(self):
        part, _ = self.collected(carried=("all_gather", "all_reduce"))
        self.assertEqual(part.why, "Strata over TCP: NCCL carried reduce_scatter on 4 ranks")

    def test_vectors_for_which_there_is_no_memory_are_left_out(self):
        sizes = [16 << 20, 1 << 30]
        self.assertEqual(pytorch.fitting(check(), sizes, 8), sizes)
        self.assertEqual(pytorch.fitting(check(gpu={"free_bytes": 16 << 30}), sizes, 8), sizes[:1])
        self.assertEqual(pytorch.fitting(check(gpu=None), sizes, 8), sizes)

    def test_ranks_that_share_a_gpu_need_a_new_nccl(self):
        part, _ = self.judged(pytorch.rail, None, torch={"nccl": [2, 29, 7]})
        self.assertEqual(part.outcome, report.SKIPPED)
        self.assertIn("NCCL 2.29.7 refuses", part.why)

    def test_a_job_without_results_fails_and_is_told(self):
        broken = lambda way, count: pytorch.Job([], f"{way.name}, rank 0 of {count} ended: why", [""] * count, [])
        for act in (pytorch.train, pytorch.capture, pytorch.collectives, pytorch.rail):
            part, goals = self.judged(act, broken)
            self.assertEqual((part.outcome, part.why), (report.FAILED, "plain NCCL, rank 0 of 4 ended: why".replace(
                "4", "2" if act is pytorch.capture else "4")))
            self.assertEqual(goals, [])


class Jobs(unittest.TestCase):
    """Ranks whose interpreter is a script that only writes which libraries it says it has."""

    def ran(self, way, program, limit=60):
        script = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in --folder) folder=$2;; esac; shift; done
leave() { echo "{\\"mapped\\": [$1]}" >$folder/result.$RANK; }
nccl='"/there/libnccl.so.2"' strata='"/there/libstrata.so"'
""" + program
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "python")
            with open(path, "w") as file:
                file.write(script)
            os.chmod(path, 0o755)
            # Nothing is there to be preloaded, which the loader says and lets pass.
            made = check(python=path, environment=dict(os.environ), library="/there/libstrata.so")
            return pytorch.job(made, "train.py", way, 2, limit, {})

    def test_each_rank_s_result_is_had(self):
        done = self.ran(pytorch.PLAIN, 'leave "$nccl"; echo "said" >$NCCL_DEBUG_FILE.strata')
        self.assertEqual((done.why, len(done.results), done.mapped), ("", 2, ["/there/libnccl.so.2"]))
        self.assertEqual(done.lines("said", 1), ["said"])

    def test_strata_is_there_when_preloaded_and_only_then_and_nccl_always(self):
        for way in (pytorch.PRELOAD, pytorch.TCP, pytorch.RAIL):
            self.assertEqual(self.ran(way, 'leave "$nccl, $strata"').why, "")
            self.assertIn("another library served", self.ran(way, 'leave "$nccl"').why)
            self.assertIn("another library served", self.ran(way, 'leave "$strata"').why)
        self.assertIn("another library served", self.ran(pytorch.PLAIN, 'leave "$nccl, $strata"').why)

    def test_each_way_has_its_own_environment(self):
        seen = 'leave "\\"$NCCL_HOSTID $STRATA_INTER $STRATA_ALLGATHER_ALGO $LD_PRELOAD libnccl\\""'
        library = "/there/libstrata.so"
        self.assertEqual(self.ran(pytorch.PLAIN, seen).mapped, ["node0    libnccl", "node1    libnccl"])
        self.assertEqual(self.ran(pytorch.TCP, seen).mapped, [f"node{rank} tcp log {library} libnccl" for rank in (0, 1)])

    def test_the_rank_that_failed_is_told_with_its_last_words(self):
        program = 'if [ $RANK = 1 ]; then echo "NCCL WARN broken" >$NCCL_DEBUG_FILE; echo why >&2; exit 3; fi; exec sleep 1000'
        self.addCleanup(setattr, processes, "GRACE", processes.GRACE)
        processes.GRACE = 0.1
        done = self.ran(pytorch.PLAIN, program)
        self.assertEqual(done.why, "plain NCCL, rank 1 of 2 ended with status 3: why\nNCCL WARN broken")
        self.assertEqual(done.results, [])

    def test_ranks_that_hang_are_told(self):
        self.assertIn("rank 0 of 2 did not end within 1 s", self.ran(pytorch.PLAIN, "exec sleep 1000", 1).why)


class Processes(unittest.TestCase):
    def test_a_program_that_does_not_end_is_ended_with_its_children(self):
        ended = processes.run(["sh", "-c", "sleep 1000 & echo $!; wait"], os.environ, 1)
        self.assertIsNone(ended.status)
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{int(ended.out)}/stat"):
            with open(f"/proc/{int(ended.out)}/stat") as file:
                if file.read().split()[2] == "Z":
                    break
            self.assertLess(time.monotonic(), deadline, "the child of a killed program lives on")

    def test_when_a_rank_fails_the_others_are_ended_soon(self):
        self.addCleanup(setattr, processes, "GRACE", processes.GRACE)
        processes.GRACE = 0.1
        start = time.monotonic()
        ranks = [os.environ | {"RANK": str(rank)} for rank in range(3)]
        program = 'case $RANK in 0) echo fine;; 1) echo why >&2; exit 7;; 2) exec sleep 1000;; esac'
        ended = processes.run_ranks(["sh", "-c", program], ranks, 100)
        self.assertEqual([each.status for each in ended], [0, 7, None])
        self.assertEqual((ended[0].out, ended[1].last_words()), ("fine\n", "why"))
        self.assertLess(time.monotonic() - start, 50)


unittest.main()
