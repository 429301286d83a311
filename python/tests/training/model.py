"""A small transformer, its data, and what a rank leaves for the comparison."""

import torch
import torch.nn as nn

WORDS, WIDTH, LENGTH, BATCH, STEPS = 64, 32, 12, 4, 12


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Words in, one number a word out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    """The model, the same on every rank and in every run."""
    torch.manual_seed(1)
    return Model()


def words(rank, step):
    """A rank's sequences for a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model, sequences):
    """The loss of predicting each next word."""
    logits = model(sequences[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, WORDS), sequences[:, 1:].reshape(-1))


def optimizer_of(parameters):
    """Steps that depend smoothly on the gradients, so that runs which round differently stay close."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(model, optimizer, rank):
    """Takes the steps; their losses."""
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, words(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(tensor):
    """All of a parameter, of which this rank may have a part."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def parameters_of(model):
    """All parameters by name. All ranks call."""
    return {name.removeprefix("module."): whole(parameter) for name, parameter in model.named_parameters()}
