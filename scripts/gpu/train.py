"""One rank: trains a small transformer under DDP and then under FSDP, from fixed seeds, and leaves every loss."""

import torch
import torch.nn as nn
from rank import Rank
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LENGTH, BATCH = 512, 128, 32, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return self.head(self.layers(self.embedding(words)))


def under_ddp(model, rank):
    return DistributedDataParallel(model, device_ids=None if rank.cpu else [0])


def under_fsdp(model, rank):
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed.fsdp import FullyShardedDataParallel
        return FullyShardedDataParallel(model, use_orig_params=True)
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh(rank.device.type, (rank.count,))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(wrap, rank):
    torch.manual_seed(1)
    model = wrap(Model().to(rank.device), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(rank.job["steps"]):
        generator = torch.Generator().manual_seed(1000 * rank.index + step)
        words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator).to(rank.device)
        logits = model(words[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def be_deterministic():
    torch.use_deterministic_algorithms(True)
    # The faster kinds of attention add up their gradients in any order.
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp", lambda enabled: None)(False)


def main():
    be_deterministic()
    rank = Rank()
    rank.leave({"DDP": train(under_ddp, rank), "FSDP": train(under_fsdp, rank)})


main()
