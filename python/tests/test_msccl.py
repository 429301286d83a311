"""Programs in msccl-tools' language: what their traces do, and that wrong programs are refused with their line."""

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from msccl_traces import Run

HERE = Path(__file__).resolve().parent
PACKAGE, EXAMPLES = HERE.parent, HERE.parent.parent / "examples" / "msccl"
sys.path.insert(0, str(PACKAGE))

from strata.msccl import CommandError, ProgramError  # noqa: E402
from strata.msccl.language import *  # noqa: E402,F403
from strata.msccl.language.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter  # noqa: E402
from strata.msccl.language.routines import allgather_ring_inplace, allreduce_ring_inplace  # noqa: E402
from strata.msccl import topologies  # noqa: E402
from strata.msccl.topologies import fully_connected, line  # noqa: E402

# Each example with numbers of ranks that fit, and what its trace's steps must number.
RUNS = {
    "ring_all_reduce": {("1",): 0, ("2",): 4, ("5", "2"): 40, ("8", "3"): 112},
    "all_pairs_all_reduce": {("2",): 6, ("3",): 18, ("8",): 168},
    "hierarchical_all_reduce": {("1", "3"): 12, ("2", "4"): 64, ("3", "2"): 36},
    "two_step_all_to_all": {("1", "3"): 9, ("3", "2"): 48, ("2", "4"): 72},
    "all_to_next": {("1", "4"): 3, ("2", "3"): 11, ("3", "4"): 29},
    "halving_doubling_all_reduce": {("2",): 4, ("4",): 16, ("16",): 128},
}


def run(*arguments, cwd=None, **env):
    """A Python program with the package of this tree: exit code, output, errors."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        line, env={**given, "PYTHONPATH": str(PACKAGE), **env}, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def example(name, arguments):
    """The trace of an example."""
    ran = run("-m", "strata.msccl", EXAMPLES / f"{name}.py", *arguments)
    if ran.returncode:
        raise AssertionError(f"{name} {arguments}: {ran.stderr}")
    return ran.stdout


def traced(prog):
    """A program's trace, as a dict."""
    return json.loads(prog.trace())


class Examples(unittest.TestCase):
    def each(self):
        """Name, trace and number of steps of every example."""
        self.assertEqual(set(RUNS), {path.stem for path in EXAMPLES.glob("*.py")})
        cases = [(name, arguments, steps) for name, runs in RUNS.items() for arguments, steps in runs.items()]
        return [(name, json.loads(example(name, arguments)), steps) for name, arguments, steps in cases]

    def test_examples_move_what_their_collectives_say(self):
        for name, trace, steps in self.each():
            with self.subTest(name=name, ranks=trace["ranks"]):
                self.assertEqual(Run(trace).faults(), [])
                self.assertEqual(len(trace["steps"]), steps)
                self.assertEqual(trace["strata_trace"], 1)
                for step in trace["steps"]:
                    self.assertTrue(None not in step.values() and f"{name}.py:" in step["at"], step)

    def test_a_step_that_is_left_out_is_noticed(self):
        for name, trace, steps in self.each():
            with self.subTest(name=name, ranks=trace["ranks"]):
                if steps:
                    trace["steps"].pop(steps // 2)
                    # A place that is read before it is written has no value.
                    with contextlib.suppress(KeyError):
                        self.assertNotEqual(Run(trace).faults(), [])

    def test_channels_blocks_parts_and_contracts_are_in_the_trace(self):
        ring = json.loads(example("ring_all_reduce", ["4", "2"]))
        self.assertTrue(all(step["channel"] == step["src"][2] % 2 for step in ring["steps"]))
        self.assertTrue(all("send_tb" not in step and "parallel" not in step for step in ring["steps"]))
        pairs = json.loads(example("all_pairs_all_reduce", ["3"]))
        self.assertEqual((pairs["instances"], pairs["protocol"], pairs["policy"]), (2, "LL", "blocked"))
        for step in pairs["steps"]:
            local = step["src"][0] == step["dst"][0]
            self.assertEqual(step["send_tb"], step["dst"][0])
            self.assertEqual(step.get("recv_tb"), None if local else step["src"][0])
            self.assertNotIn("channel", step)
        levels = json.loads(example("hierarchical_all_reduce", ["2", "2"]))
        parts = [step.get("parallel") for step in levels["steps"]]
        self.assertEqual(parts, [[2, 0]] * 4 + [None] * 8 + [[2, 1]] * 4)
        following = json.loads(example("all_to_next", ["2", "2"]))
        self.assertEqual(following["contract"], [{"ranks": "1-3", "chunks": "0-1", "rank_shift": -1}])


class Compiled(unittest.TestCase):
    """With the command that STRATA_COMMAND names."""

    def setUp(self):
        self.command = os.environ.get("STRATA_COMMAND")
        if not self.command:
            self.skipTest("STRATA_COMMAND names no command; scripts/check msccl runs this")
        said = subprocess.run([self.command, "plan", "--help"], capture_output=True, text=True, timeout=60).stdout
        if "compile" not in said:
            self.skipTest("the command has no plan compile")

    def test_examples_compile_and_verify(self):
        for name, runs in RUNS.items():
            for arguments in list(runs)[-2:]:
                with self.subTest(name=name, arguments=arguments), tempfile.TemporaryDirectory() as folder:
                    ran = run(EXAMPLES / f"{name}.py", *arguments, STRATA_COMMAND=self.command)
                    self.assertEqual(ran.returncode, 0, ran.stderr)
                    file = Path(folder) / f"{name}.xml"
                    file.write_text(ran.stdout)
                    contract = json.loads(example(name, arguments)).get("contract")
                    if contract:
                        rules = ["\n".join(f"{key} = {json.dumps(value)}" for key, value in rule.items()) for rule in contract]
                        file.with_suffix(".toml").write_text("".join(f"[[output]]\n{rule}\n" for rule in rules))
                    proof = subprocess.run(
                        [self.command, "plan", "verify", str(file)], capture_output=True, text=True, timeout=120
                    )
                    self.assertEqual(proof.returncode, 0, proof.stdout + proof.stderr)

    def test_a_program_that_does_half_of_its_collective_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "half.py"
            script.write_text(
                "from strata.msccl.language import *\nfrom strata.msccl.language.collectives import AllReduce\n"
                "from strata.msccl.topologies import *\n"
                "with MSCCLProgram('half', fully_connected(2), AllReduce(2, 1, True), 1):\n"
                "    chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))\n"
                "    XML()\n"
            )
            ran = run(script, STRATA_COMMAND=self.command)
            self.assertEqual((ran.returncode, ran.stdout), (1, ""))
            self.assertIn("CommandError", ran.stderr)


class Places(unittest.TestCase):
    """Buffers in place and out of place, references and what becomes of them."""

    def test_the_named_collectives_work_in_place_and_out_of_place(self):
        for inplace in (False, True):
            with MSCCLProgram("g", fully_connected(3), AllGather(3, 2, inplace), 1) as prog:
                for rank in range(3):
                    for peer in range(3):
                        if peer != rank or not inplace:
                            chunk(rank, Buffer.input, 0, 2).copy(peer, Buffer.output, 2 * rank)
            self.assertEqual(prog.steps[0]["src"], [0, "input", 0])
            self.assertTrue(prog.collective.check(prog))
            self.assertEqual(Run(traced(prog)).faults(), [])
            with MSCCLProgram("s", fully_connected(2), ReduceScatter(2, 1, inplace), 1) as prog:
                for rank in range(2):
                    if not inplace:
                        chunk(rank, Buffer.input, rank).copy(rank, Buffer.output, 0)
                    chunk(rank, Buffer.output, 0).reduce(chunk(1 - rank, Buffer.input, rank))
            self.assertTrue(prog.collective.check(prog))
            self.assertEqual(Run(traced(prog)).faults(), [])
            with MSCCLProgram("r", fully_connected(2), AllReduce(2, 1, inplace), 1) as prog:
                chunk(0, Buffer.input, 0).copy(0, Buffer.output, 0).reduce(chunk(1, Buffer.input, 0)).copy(1)
            self.assertEqual(len(prog.steps), 2 if inplace else 3)
            self.assertEqual(Run(traced(prog)).faults(), [])

    def test_an_input_in_place_goes_to_where_it_belongs_in_each_output(self):
        with MSCCLProgram("g", fully_connected(2), AllGather(2, 1, True), 1) as prog:
            chunk(0, Buffer.input, 0).copy(1, Buffer.input, 0)
            chunk(1, Buffer.input, 0).copy(0, Buffer.input, 0)
        self.assertEqual([step["dst"] for step in prog.steps], [[1, "output", 0], [0, "output", 1]])
        self.assertEqual(Run(traced(prog)).faults(), [])

    def test_an_all_to_all_in_place_holds_one_buffer(self):
        with MSCCLProgram("a", fully_connected(2), AllToAll(2, 1, True), 1) as prog:
            chunk(0, Buffer.input, 1).copy(0, "kept")
            chunk(1, Buffer.input, 0).copy(0, Buffer.output, 1)
            chunk(0, "kept", 0).copy(1, Buffer.output, 0)
        self.assertTrue(prog.collective.check(prog))
        self.assertEqual(Run(traced(prog)).faults(), [])

    def test_rings_of_the_routines_do_what_they_say(self):
        with MSCCLProgram("g", fully_connected(4), AllGather(4, 1, True), 1) as prog:
            allgather_ring_inplace(4, ch=2)
        self.assertEqual({step["channel"] for step in prog.steps}, {2})
        self.assertEqual(Run(traced(prog)).faults(), [])
        with MSCCLProgram("r", fully_connected(8), AllReduce(8, 8, True), 1) as prog:
            for node in (0, 4):
                for part in (0, 4):
                    allreduce_ring_inplace(4, node, part)
            for rank in range(4):
                for part in (0, 4):
                    chunk(rank, Buffer.input, part, 4).reduce(chunk(rank + 4, Buffer.input, part, 4)).copy(rank + 4)
        self.assertEqual(Run(traced(prog)).faults(), [])

    def test_scratch_buffers_grow_behind_their_end(self):
        with MSCCLProgram("x", fully_connected(2), AllReduce(2, 2, False), 1) as prog:
            create_scratch(1, "own")
            self.assertEqual(chunk(0, Buffer.input, 0).copy(1, "own", 2).index, 2)
            self.assertEqual(chunk(0, Buffer.input, 0, 2).copy(1, "own").index, 3)
            self.assertEqual(chunk(0, Buffer.input, 0).copy(1, (0, 1)).index, 0)
            chunk(1, "own", 2).send(0, Buffer.scratch, 0)
        self.assertEqual([step["dst"][1] for step in prog.steps], ["own", "own", "(0, 1)", "scratch"])

    def test_references_are_split_and_grouped(self):
        with MSCCLProgram("x", fully_connected(2), AllReduce(2, 4, True), 1):
            left, right = chunk(0, Buffer.output, 0, 4).split(2)
            self.assertEqual((right.index, right.size, right.traced()), (2, 2, (0, "output", 2)))
            both = right.group(left)
            self.assertEqual((both.index, both.size), (0, 4))
            self.assertEqual((both.get_origin_rank(3), both.get_origin_index(3), both.get_dst_index(3)), (0, 3, 3))

    def test_thread_blocks_count_by_hand_only_and_one_of_a_local_step(self):
        for policy, wanted in ((ThreadblockPolicy.manual, [(3, 4), (3, None)]), (ThreadblockPolicy.auto, [(None, None)] * 2)):
            with MSCCLProgram("x", fully_connected(2), AllReduce(2, 1, True), 1, threadblock_policy=policy) as prog:
                chunk(0, Buffer.input, 0).copy(1, "x", sendtb=3, recvtb=4)
                chunk(0, Buffer.input, 0).copy(0, "x", sendtb=3, recvtb=4)
            self.assertEqual([(step.get("send_tb"), step.get("recv_tb")) for step in prog.steps], wanted)

    def test_chunks_know_where_they_belong(self):
        for collective, where in (
            (AllToAll(3, 2, False), (2, 3)),
            (AllGather(3, 6, False), (-1, 11)),
            (AllReduce(3, 6, False), (-1, 5)),
            (ReduceScatter(3, 2, False), (2, 1)),
        ):
            with MSCCLProgram("x", fully_connected(3), collective, 1):
                c = chunk(1, Buffer.input, 5)
            self.assertEqual((c.get_dst_rank(), c.get_dst_index(), c.get_origin_rank(), c.get_origin_index()), (*where, 1, 5))

    def test_a_check_notices_a_wrong_chunk_and_a_wrong_reduction(self):
        with MSCCLProgram("g", fully_connected(2), AllGather(2, 1, True), 1) as prog:
            chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0).copy(1, Buffer.output, 1)
            chunk(0, Buffer.input, 0).copy(0, Buffer.output, 1)
        with MSCCLProgram("r", fully_connected(2), AllReduce(2, 1, True), 1) as other:
            chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))
            chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))
        for wrong in (prog, other):
            with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(ProgramError) as failed:
                wrong.check()
            self.assertIn("rank 1, output chunk", said.getvalue())
            # Whoever sees the error alone sees the first wrong place.
            self.assertRegex(str(failed.exception), r"check\(\) returned False: rank \d, output chunk \d: holds .*, should hold ")

    def test_the_reduction_of_earlier_releases_goes_the_other_way(self):
        with MSCCLProgram("x", fully_connected(2), AllReduce(2, 1, True), 1) as prog:
            chunk(0, Buffer.input, 0).reduce(1, Buffer.input, 0, ch=3).send(0, Buffer.input, 0)
        self.assertEqual([step["dst"][0] for step in prog.steps], [1, 0])
        self.assertEqual(prog.steps[0]["channel"], 3)
        self.assertEqual(Run(traced(prog)).faults(), [])


class Topologies(unittest.TestCase):
    def test_topologies_have_the_links_of_their_form(self):
        degrees = {"fully_connected": 4, "hub_and_spoke": 4, "ring": 2}
        for name, degree in degrees.items():
            made = getattr(topologies, name)(5)
            self.assertEqual([sum(1 for _ in made.destinations(rank)) for rank in made.nodes()], [degree] * 5, name)
        self.assertEqual([list(line(3).sources(rank)) for rank in range(3)], [[1], [0, 2], [1]])
        self.assertEqual(list(topologies.star(4).destinations(2)), [0])

    def test_machines_have_as_many_links_for_each_gpu(self):
        for made, total in ((topologies.dgx1(), 6), (topologies.dgx_a100(), 84), (topologies.amd8(), 38), (topologies.amd4(), 2)):
            self.assertEqual([sum(row) for row in made.links], [total] * made.num_nodes(), made.name)
            self.assertEqual([list(row) for row in zip(*made.links)], made.links)
        table = "\tGPU0\tGPU1\tmlx\nGPU0\t X \tNV12\tSYS\nGPU1\tNV4\t X \tSYS\nmlx\tSYS\tSYS\t X \n"
        self.assertEqual(topologies.nvlink_only(table).links, [[0, 12], [4, 0]])

    def test_nodes_have_links_of_the_remote_bandwidth(self):
        made = topologies.distributed_hub_and_spoke(topologies.hub_and_spoke(2), 2, 7)
        self.assertEqual(made.links, [[0, 1, 7, 7], [1, 0, 7, 7], [7, 7, 0, 1], [7, 7, 1, 0]])
        self.assertEqual(len(made.switches), 4 * 2 + 4)
        self.assertIn(([2, 3], [0, 1], 7, "copy_1_out_remote"), made.switches)
        self.assertIn(([3], [2], 1, "copy_1_node_1_out_local"), made.switches)
        self.assertRaises(ValueError, topologies.Topology, "none", [[0]], [([0], [0], 0, "dead")])


# The wrong line is marked, and what the error says.
WRONG = [
    ("stale", "a = chunk(0, Buffer.input, 0); b = chunk(1, Buffer.input, 0)\nb.copy(0, Buffer.input, 0)\na.copy(1, 'x')  # <-",
     "stale: script.py:7 has written there"),
    ("stale in place", "a = chunk(0, Buffer.input, 0)\nchunk(1, Buffer.input, 0).copy(0, Buffer.output, 0)\na.copy(1, 'x')  # <-", "stale"),
    ("stale in part", "a = chunk(0, Buffer.input, 0, 2)\nchunk(1, Buffer.input, 1).copy(0, Buffer.input, 1)\na.split(2)  # <-", "stale"),
    ("stale by a reduction", "a = chunk(0, Buffer.input, 0)\nchunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))\n"
     "chunk(1, Buffer.input, 1).reduce(a)  # <-", "stale"),
    ("stale target", "a = chunk(0, Buffer.input, 0)\nchunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))\n"
     "a.reduce(chunk(1, Buffer.input, 1))  # <-", "stale"),
    ("rank", "chunk(3, Buffer.input, 0)  # <-", "rank 3 is not in 0 to 2"),
    ("rank below 0", "chunk(-1, Buffer.input, 0)  # <-", "rank -1"),
    ("no rank", "chunk('a', Buffer.input, 0)  # <-", "the rank is 'a', not a whole number"),
    ("copy to no rank", "chunk(0, Buffer.input, 0).copy(3)  # <-", "rank 3 is not in 0 to 2"),
    ("index", "chunk(0, Buffer.input, 1, 2)  # <-", "input[1:3] of rank 0 is out of range: it has 2 chunks"),
    ("index below 0", "chunk(0, Buffer.input, -1)  # <-", "below 0"),
    ("copy out of range", "chunk(0, Buffer.input, 0, 2).copy(1, Buffer.output, 1)  # <-", "out of range"),
    ("copy without an index", "chunk(0, Buffer.input, 0).copy(1, Buffer.output)  # <-", "needs an index"),
    ("no chunks", "chunk(0, Buffer.input, 0, 0)  # <-", "at least 1"),
    ("counts", "chunk(0, Buffer.input, 0, 2).reduce(chunk(1, Buffer.input, 0))  # <-", "1 chunks and"),
    ("empty", "chunk(0, Buffer.input, 0).copy(1, 'x', 1)\nchunk(1, 'x', 0)  # <-", "x[0] of rank 1 holds nothing yet"),
    ("no scratch", "chunk(0, 'x', 0)  # <-", "rank 0 has no scratch buffer 'x'"),
    ("name", "chunk(0, Buffer.input, 0).copy(1, 'input', 0)  # <-", "Buffer.input"),
    ("overlap", "chunk(0, Buffer.input, 0).reduce(chunk(0, Buffer.output, 0))  # <-", "overlap"),
    ("link", "chunk(0, Buffer.input, 0).copy(2)  # <-", "no link from rank 0 to rank 2"),
    ("split", "chunk(0, Buffer.input, 0).split(2)  # <-", "cannot be split into 2"),
    ("group", "chunk(0, Buffer.input, 0).group(chunk(1, Buffer.input, 0))  # <-", "not of one buffer"),
    ("channel", "chunk(0, Buffer.input, 0).copy(1, ch=-2)  # <-", "ch is -2"),
    ("parts", "parallelize(0)  # <-", "at least 1"),
    ("parts in parts", "with parallelize(2):\n    with parallelize(2): pass  # <-", "inside another one"),
    ("program in a program", "MSCCLProgram('b', line(3), AllReduce(3, 2, True), 1).__enter__()  # <-", "still open"),
    ("check", "Check()  # <-", "does not do what its collective says"),
    ("instances", "MSCCLProgram('b', line(3), AllReduce(3, 2, True), 0)  # <-", "at least 1"),
    ("protocol", "MSCCLProgram('b', line(3), AllReduce(3, 2, True), 1, 'simple')  # <-", "protocol 'simple'"),
    ("ranks", "MSCCLProgram('b', line(4), AllReduce(3, 2, True), 1)  # <-", "3 ranks and the topology 4"),
]  # fmt: skip


class Wrong(unittest.TestCase):
    def test_wrong_programs_are_refused_with_their_line(self):
        head = (
            "from strata.msccl.language import *\nfrom strata.msccl.language.collectives import AllReduce\n"
            "from strata.msccl.topologies import *\n\n"
            "with MSCCLProgram('a', line(3), AllReduce(3, 2, True), 1):\n"
        )
        for name, body, said in WRONG:
            with self.subTest(name=name):
                text = head + "".join(f"    {row}\n" for row in body.split("\n"))
                number = next(at for at, row in enumerate(text.split("\n"), 1) if row.endswith("# <-"))
                with self.assertRaises(ProgramError) as caught, contextlib.redirect_stderr(io.StringIO()):
                    exec(compile(text, "script.py", "exec"), {})
                self.assertTrue(str(caught.exception).startswith(f"script.py:{number}: "), caught.exception)
                self.assertIn(said, str(caught.exception))

    def test_an_output_in_place_on_another_rank_is_ambiguous(self):
        with MSCCLProgram("s", fully_connected(2), ReduceScatter(2, 1, True), 1):
            with self.assertRaisesRegex(ProgramError, r"output\[0\] is input\[1\] on rank 1 and input\[0\] on rank 0"):
                chunk(0, Buffer.input, 1).copy(1, Buffer.output, 0)

    def test_words_outside_of_a_program_are_refused(self):
        for word in (lambda: chunk(0, Buffer.input, 0), Check, XML, Trace):
            with self.assertRaisesRegex(ProgramError, "test_msccl.py:[0-9]+: there is no program here"):
                word()


class Held(Collective):
    """A collective that wants what a function says: `wanted(rank, index)`, a chunk or None."""

    def __init__(self, ranks, chunks, wanted):
        super().__init__(ranks, chunks, False)
        self.wanted = wanted

    def init_buffers(self):
        given = lambda rank: [Chunk(rank, index) for index in range(self.chunk_factor)]  # noqa: E731
        return [{Buffer.input: given(rank), Buffer.output: [None] * self.chunk_factor} for rank in range(self.num_ranks)]

    def check(self, prog):
        places = [(rank, index) for rank in range(self.num_ranks) for index in range(self.chunk_factor)]
        wanted = [(rank, index, self.wanted(rank, index)) for rank, index in places]
        return all(prog.buffers[rank][Buffer.output][index] == value for rank, index, value in wanted if value)


class Contracts(unittest.TestCase):
    def moved(self, wanted, ranks=4, chunks=3):
        """The contract of a program that copies to each place what it should hold, and holds other things elsewhere."""
        with MSCCLProgram("c", fully_connected(ranks), Held(ranks, chunks, wanted), 1) as prog:
            for rank in range(ranks):
                for index in range(chunks):
                    value = wanted(rank, index) or Chunk(0, 0)
                    chunk(value.origin_rank, Buffer.input, value.origin_index).copy(rank, Buffer.output, index)
            trace = traced(prog)
        promised = Run(trace)
        self.assertEqual(promised.faults(), [])
        for rank in range(ranks):
            for index in range(chunks):
                self.assertEqual(promised.wanted(rank, index) is None, wanted(rank, index) is None, (rank, index))
        return trace["contract"]

    def test_rules_are_found_and_few(self):
        shifted = self.moved(lambda rank, index: Chunk(rank - 1, index) if rank else None)
        self.assertEqual(shifted, [{"ranks": "1-3", "chunks": "0-2", "rank_shift": -1}])
        root = self.moved(lambda rank, index: Chunk(2, index))
        self.assertEqual(root, [{"ranks": "0-3", "chunks": "0-2", "rank": 2}])
        own = self.moved(lambda rank, index: Chunk(rank, index) if index else None)
        self.assertEqual(own, [{"ranks": "0-3", "chunks": "1-2", "rank_shift": 0}])
        for sources in ((0, 1, 0, 3), (0, 0, 2, 3), (1, 1, 3, 3), (0, 1, 2, 2)):
            self.moved(lambda rank, index, sources=sources: Chunk(sources[rank], index))
        turned = self.moved(lambda rank, index: Chunk(rank, (index + 1) % 3))
        self.assertEqual(len(turned), 2)

    def test_any_movement_is_promised_as_it_is(self):
        for seed in range(40):
            mixed = lambda rank, index, seed=seed: (  # noqa: E731
                Chunk((rank * seed + index) % 4, (rank + index * seed) % 3) if (rank * 7 + index + seed) % 5 else None
            )
            self.moved(mixed)

    def test_a_reduction_of_all_ranks_is_promised_and_one_of_some_is_not(self):
        for peers in (3, 2):
            wanted = ReduceChunk(-1, [Chunk(rank, 0) for rank in range(peers)])
            with MSCCLProgram("c", fully_connected(3), Held(3, 1, lambda rank, index: None if rank else wanted), 1) as prog:
                target = chunk(0, Buffer.input, 0).copy(0, Buffer.output, 0)
                for rank in range(1, peers):
                    target.reduce(chunk(rank, Buffer.input, 0))
                if peers == 3:
                    trace = traced(prog)
                    self.assertEqual(trace["contract"], [{"ranks": "0", "chunks": "0", "reduced": True}])
                    self.assertEqual(Run(trace).faults(), [])
                else:
                    self.assertRaisesRegex(ProgramError, "no output that a contract can speak of", prog.trace)

    def test_results_in_the_input_are_promised_where_the_program_is_in_place(self):
        class Root(Held):
            def check(self, prog):
                return prog.buffers[1][Buffer.input][0] == ReduceChunk([Chunk(0, 0), Chunk(1, 0)])

        for inplace in (True, False):
            collective = Root(2, 1, None)
            collective.inplace = inplace
            with MSCCLProgram("c", fully_connected(2), collective, 1) as prog:
                chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))
                if not inplace:
                    self.assertRaisesRegex(ProgramError, "no output that a contract can speak of", prog.trace)
                    continue
                trace = traced(prog)
            self.assertEqual((trace["in_place"], trace["contract"]), (True, [{"ranks": "1", "chunks": "0", "reduced": True}]))
            self.assertEqual(Run(trace).faults(), [])

    def test_what_a_contract_cannot_speak_of_beside_what_it_can_is_told(self):
        wanted = lambda rank, index: ReduceChunk([Chunk(0, 0), Chunk(1, 1)]) if index else Chunk(0, 0)  # noqa: E731
        with MSCCLProgram("c", fully_connected(2), Held(2, 2, lambda rank, index: None if rank else wanted(rank, index)), 1) as prog:
            chunk(0, Buffer.input, 0).copy(0, Buffer.output, 0)
            chunk(0, Buffer.input, 0).copy(0, Buffer.output, 1).reduce(chunk(1, Buffer.input, 1))
            self.assertRaisesRegex(ProgramError, "looks at 1 chunks that a contract cannot speak of", prog.trace)

    def test_a_chunk_that_two_inputs_hold_is_no_promise(self):
        class Twice(Held):
            def init_buffers(self):
                return [{Buffer.input: [Chunk(0, 0)], Buffer.output: [None]} for _ in range(self.num_ranks)]

        with MSCCLProgram("c", fully_connected(2), Twice(2, 1, lambda rank, index: Chunk(0, 0) if rank else None), 1) as prog:
            chunk(1, Buffer.input, 0).copy(1, Buffer.output, 0)
            self.assertRaisesRegex(ProgramError, "no output that a contract can speak of", prog.trace)

    def test_a_program_that_fails_its_own_check_has_no_trace(self):
        with MSCCLProgram("c", fully_connected(2), Held(2, 1, lambda rank, index: Chunk(0, 0)), 1) as prog:
            chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0)
            self.assertRaisesRegex(ProgramError, r"Held.check\(\) returned False", prog.trace)


class Commands(unittest.TestCase):
    """How strata is found and run, and `python -m strata.msccl`."""

    PROGRAM = (
        "from strata.msccl.language import *\nfrom strata.msccl.language.collectives import AllReduce\n"
        "from strata.msccl.topologies import *\n"
        "for name in %r:\n"
        "    with MSCCLProgram(name, fully_connected(2), AllReduce(2, 1, True), 1):\n"
        "        chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0)).copy(1)\n"
        "        print('noise')\n        Check()\n        %s\n"
    )

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def script(self, names=("one",), last="XML()"):
        script = self.folder / "script.py"
        script.write_text(self.PROGRAM % (names, last))
        return script

    def command(self, place, text):
        """A command that counts its runs and does what the text says."""
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\necho \"$1 $2\" >> {self.folder}/runs\n{text}\n")
        place.chmod(0o755)
        return str(place)

    def test_xml_prints_what_the_command_prints_and_runs_it_once(self):
        given = self.command(self.folder / "own", 'cat "$3"; echo "<algo>"')
        ran = run(self.script(), STRATA_COMMAND=given)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        trace = ran.stdout[len("noise\n") : -len("<algo>\n")]
        self.assertEqual(Run(json.loads(trace)).faults(), [])
        self.assertEqual((self.folder / "runs").read_text(), "plan compile\n")
        self.assertEqual(ran.stdout[-7:], "<algo>\n")

    def test_xml_with_a_file_has_the_command_write_it(self):
        given = self.command(self.folder / "own", '[ "$4" = --output ] || exit 0; cp "$3" "$5"; echo "[[output]]" > "${5%xml}toml"')
        ran = run(self.script(last=f"XML({str(self.folder / 'one.xml')!r})"), STRATA_COMMAND=given)
        self.assertEqual((ran.returncode, ran.stdout), (0, "noise\n"), ran.stderr)
        self.assertEqual(Run(json.loads((self.folder / "one.xml").read_text())).faults(), [])
        self.assertEqual((self.folder / "one.toml").read_text(), "[[output]]\n")

    def test_the_command_is_found_beside_the_library_and_on_the_path(self):
        prefix = self.folder / "prefix"
        self.command(prefix / "bin" / "strata", "echo installed")
        self.command(self.folder / "path" / "strata", "echo on the path")
        path = f"{self.folder / 'path'}:{os.environ['PATH']}"
        library = str(prefix / "lib" / "libstrata.so")
        # Not the one in the folder where a program happens to run.
        self.command(self.folder / "strata", "echo wrong")
        for env, said in (({"STRATA_LIBRARY": library}, "installed"), ({"STRATA_LIBRARY": "auto"}, "on the path"), ({}, "on the path")):
            ran = run(self.script(), cwd=self.folder, PATH=path, **env)
            self.assertEqual(ran.stdout, f"noise\n{said}\n", ran.stderr)

    def test_a_command_that_refuses_or_is_not_there_is_an_error(self):
        refusing = self.command(self.folder / "refuses", "echo 'script.py:6: no' >&2; exit 1")
        for env, said in (
            ({"STRATA_COMMAND": refusing}, "plan compile: script.py:6: no"),
            ({"STRATA_COMMAND": "/nowhere"}, "STRATA_COMMAND=/nowhere is not a program"),
            ({"PATH": str(self.folder)}, "STRATA_COMMAND names it"),
        ):
            ran = run(self.script(), **env)
            self.assertEqual((ran.returncode, ran.stdout), (1, "noise\n"))
            self.assertIn("CommandError: ", ran.stderr)
            self.assertIn(said, ran.stderr)

    def test_trace_prints_the_trace(self):
        ran = run(self.script(last="Trace()"), STRATA_COMMAND=self.command(self.folder / "own", "true"))
        self.assertEqual(Run(json.loads(ran.stdout[len("noise\n") :])).faults(), [])

    def test_what_a_check_prints_does_not_get_into_the_xml(self):
        script = self.script(last="XML()")
        own = "class Own(AllReduce):\n    def check(self, prog):\n        print('looked')\n        return True\n"
        text = script.read_text().replace("AllReduce(", "Own(").replace("for name", own + "for name")
        script.write_text(text)
        ran = run(script, STRATA_COMMAND=self.command(self.folder / "own", "echo xml"))
        self.assertEqual((ran.stdout, ran.stderr), ("noise\nxml\n", "looked\n"))

    def test_the_module_writes_one_trace_and_needs_no_command(self):
        several = self.script(("one", "two"), "XML(); Trace()")
        ran = run("-m", "strata.msccl", "--program", "2", several)
        self.assertEqual((ran.returncode, json.loads(ran.stdout)["name"]), (0, "two"))
        self.assertIn("noise", ran.stderr)
        self.assertNotIn("strata_trace", ran.stderr)
        for arguments in ([several], ["--program", "3", several]):
            ran = run("-m", "strata.msccl", *arguments)
            self.assertEqual((ran.returncode, ran.stdout), (1, ""))
            self.assertIn("has 2 programs (1 one, 2 two)", ran.stderr)

    def test_the_module_tells_errors_in_a_line(self):
        wrong = self.script(last="chunk(2, Buffer.input, 0)")
        ran = run("-m", "strata.msccl", wrong)
        self.assertEqual((ran.returncode, ran.stdout), (1, ""))
        self.assertEqual(ran.stderr.splitlines()[-1], f"strata: {wrong}:9: rank 2 is not in 0 to 1")
        for arguments in ([], ["--program"], [self.folder / "none.py"]):
            ran = run("-m", "strata.msccl", *arguments)
            self.assertEqual((ran.returncode, ran.stdout, "Traceback" in ran.stderr), (1, "", False))

    def test_the_package_is_python_3_8(self):
        files = [*(PACKAGE / "strata" / "msccl").rglob("*.py"), *EXAMPLES.glob("*.py")]
        self.assertGreater(len(files), 20)
        for file in files:
            ast.parse(file.read_text(), str(file), feature_version=(3, 8))


if __name__ == "__main__":
    unittest.main()
