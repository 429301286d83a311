"""What the programs of one rank share: joining the others, knowing which library served, leaving a result."""

import argparse
import faulthandler
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


class Rank:
    """One rank of a job that check.py has started."""

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--folder", required=True, help="where ranks meet and leave their results")
        parser.add_argument("--limit", type=float, required=True, help="seconds after which the rank gives up")
        parser.add_argument("--cpu", action="store_true", help="a rehearsal with gloo on the processor")
        parser.add_argument("--job", default="{}", help="what to do, as JSON")
        options = parser.parse_args()
        # A rank that hangs tells where, and ends.
        faulthandler.dump_traceback_later(options.limit, exit=True)
        self.deadline = time.monotonic() + options.limit
        self.index, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder, self.cpu, self.job = options.folder, options.cpu, json.loads(options.job)
        self.device = torch.device("cpu") if self.cpu else torch.device("cuda", 0)
        if self.cpu:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
        store = dist.FileStore(os.path.join(self.folder, "store"), self.count)
        self.store = dist.PrefixStore("check", store)
        dist.init_process_group(
            "gloo" if self.cpu else "nccl", store=dist.PrefixStore("torch", store), rank=self.index,
            world_size=self.count, timeout=timedelta(seconds=options.limit))

    def agree(self, name, value):
        """Rank 0's value, on all ranks."""
        if self.index == 0:
            self.store.set(name, json.dumps(value))
        return json.loads(self.store.get(name))

    def synchronize(self):
        if not self.cpu:
            torch.cuda.synchronize()

    def leave(self, result):
        """Writes the result, and ends the job."""
        with open("/proc/self/maps") as maps:
            wanted = ("libnccl.so", "librccl.so", "libstrata")
            mapped = {line.split()[-1] for line in maps if any(name in line for name in wanted)}
        result["mapped"] = sorted(mapped)
        path = os.path.join(self.folder, f"result.{self.index}")
        with open(path + ".part", "w") as file:
            json.dump(result, file)
        os.rename(path + ".part", path)
        self.synchronize()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
