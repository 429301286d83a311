"""One rank: captures an all-reduce and an all-gather into a graph, and replays it with other numbers each time."""

import torch
import torch.distributed as dist
from rank import Rank

COUNT = 1 << 16


def main():
    rank = Rank()
    source = torch.zeros(COUNT, device=rank.device)
    summed = torch.zeros(COUNT, device=rank.device)
    gathered = torch.zeros(COUNT * rank.count, device=rank.device)

    def step():
        summed.copy_(source)
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(gathered, source)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, PyTorch's watchdog among them, may go on using the driver meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    right = []
    for replay in range(rank.job["replays"]):
        source.fill_(float(rank.index + 10 * replay))
        graph.replay()
        torch.cuda.synchronize()
        ranks = torch.arange(rank.count, device=rank.device, dtype=torch.float32) + 10 * replay
        is_right = torch.equal(summed, ranks.sum().expand(COUNT))
        right.append(is_right and torch.equal(gathered, ranks.repeat_interleave(COUNT)))
    # Outside of a graph the communicator works on.
    step()
    torch.cuda.synchronize()
    after = bool(torch.equal(gathered, ranks.repeat_interleave(COUNT)))
    rank.leave({"right": right, "after": after})


main()
