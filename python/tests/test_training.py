"""Whole training runs under torchrun: the same scripts with "gloo" and with "strata" learn the same."""

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import ranks
import torch

_SCRIPTS = Path(__file__).resolve().parent / "training"
_LIMIT = 150
# The ways of train.py in which every rank has all of the model at the end, or a part that is its own.
WAYS = ["ddp", "ddp_hooks", "fsdp2", "tensor_parallel", "pipeline", "checkpoint"]
STAGES = ["2", "3"]


def below(pid):
    """All processes that a process has started, and those that they have."""
    try:
        children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    except OSError:
        return []
    return children + [far for child in children for far in below(child)]


def start(count, script, *arguments, module=(), env=None):
    """Runs a script under torchrun. Its output; an exception where it fails or takes too long."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    line = [*agent, *module, str(_SCRIPTS / script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as output:
        environment = dict(ranks.environment(), **(env or {}))
        process = subprocess.Popen(line, env=environment, stdout=output, stderr=output)
        try:
            code = process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            for pid in [*below(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code != 0:
        raise AssertionError(f"{' '.join(line)} ended with {code}\n{text}")
    return text


def start_baseline(*line):
    """Runs a script on PyTorch's own gloo, three times at most: now and then its threads abort the process as it ends ("terminate
    called without an active exception", 2 runs of some 60), and that says nothing of Strata."""
    for attempt in range(1, 4):
        try:
            return start(*line)
        except AssertionError as error:
            if attempt == 3 or "exitcode: -6" not in str(error):
                raise
            print(f"gloo's run {attempt} was aborted; once more", flush=True)


class Run:
    """What the ranks of one run have left."""

    def __init__(self, count, script, backend, ways, **options):
        self.count = count
        is_baseline = backend == "gloo" and not options
        with tempfile.TemporaryDirectory() as folder:
            begin = start_baseline if is_baseline else functools.partial(start, **options)
            self.text = begin(count, script, backend, folder, *ways)
            self.left = {path.stem: torch.load(path) for path in Path(folder).glob("*.pt")}

    def of(self, way):
        """Losses and parameters of a way, rank after rank."""
        return [self.left[f"{way}-{rank}"] for rank in range(self.count)]


@functools.cache
def training(count, backend):
    """The run of train.py in all ways."""
    return Run(count, "train.py", backend, WAYS)


class Training(unittest.TestCase):
    def same(self, one, other, what):
        """Fails unless losses and parameters are equal bit by bit."""
        for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            self.assertEqual(mine["losses"], theirs["losses"], f"{what}, rank {rank}")
            self.assertEqual(mine["parameters"].keys(), theirs["parameters"].keys())
            for name, tensor in mine["parameters"].items():
                self.assertTrue(torch.equal(tensor, theirs["parameters"][name]), f"{what}, rank {rank}: {name}")

    def close(self, one, other, what):
        """Fails unless losses and parameters are equal within 1e-6 of their size."""
        for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            pairs = [(torch.tensor(mine["losses"]), torch.tensor(theirs["losses"]), "losses")]
            pairs += [(tensor, theirs["parameters"][name], name) for name, tensor in mine["parameters"].items()]
            for tensor, expected, name in pairs:
                if not expected.numel():
                    continue
                difference = (tensor - expected).abs().max() / expected.abs().max()
                self.assertLess(difference.item(), 1e-6, f"{what}, rank {rank}: {name}")

    def test_two_ranks_learn_what_gloo_s_learn_bit_by_bit(self):
        gloo, strata = training(2, "gloo"), training(2, "strata")
        for way in WAYS:
            with self.subTest(way=way):
                self.same(strata.of(way), gloo.of(way), way)

    def test_four_ranks_learn_nearly_what_gloo_s_learn(self):
        gloo, strata = training(4, "gloo"), training(4, "strata")
        for way in WAYS:
            # 16-bit sums of four depend on their order by more.
            if way != "ddp_hooks":
                with self.subTest(way=way):
                    self.close(strata.of(way), gloo.of(way), way)

    def test_ddp_and_fsdp2_learn_the_same_bit_by_bit_in_every_run(self):
        one, other = training(4, "strata"), Run(4, "train.py", "strata", ["ddp", "fsdp2"])
        self.same(one.of("ddp"), other.of("ddp"), "ddp")
        self.same(one.of("fsdp2"), other.of("fsdp2"), "fsdp2")
        self.same(one.of("ddp"), one.of("fsdp2"), "ddp and fsdp2")

    def test_a_script_that_says_gloo_runs_on_strata_in_its_place(self):
        options = {"module": ("-m", "strata.torch"), "env": {"NCCL_DEBUG": "INFO"}}
        instead = Run(2, "train.py", "gloo", ["ddp"], **options)
        self.assertIn('strata: "gloo" makes groups of Strata in this process', instead.text)
        self.same(instead.of("ddp"), training(2, "strata").of("ddp"), "python -m strata.torch")

    def test_deepspeed_learns_what_it_learns_with_gloo(self):
        if importlib.util.find_spec("deepspeed") is None:
            print("SKIPPED: DeepSpeed is not installed", flush=True)
            return
        ways = [f"zero{stage}" for stage in STAGES]
        for count, compare in ((2, self.same), (4, self.close)):
            gloo, strata = (Run(count, "zero.py", backend, STAGES) for backend in ("gloo", "strata"))
            for way in ways:
                with self.subTest(way=way, ranks=count):
                    compare(strata.of(way), gloo.of(way), way)


if __name__ == "__main__":
    unittest.main()
