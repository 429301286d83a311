"""Data-parallel training whose forward pass follows the all-reduce of the gradients: C-Cube's gradient queuing (Jo, Son and
Kim, HPCA 2023, section III-D) as a communication hook of DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/ccube.py                              # or --backend gloo
    strata launch -n 4 --nodes 4 -- python examples/ccube.py --steps 20

The hook puts DDP's buckets into one flat buffer, the first layer's gradients first, and one call sums it over the ranks after
the last bucket. A layer's forward pass then waits for its own part of the buffer, takes the optimizer's step for its own
parameters and computes, while the call goes on with the layers behind it. Over another backend than Strata the first
layer waits for the whole call.

It trains the same model three times and compares the losses: `chain` as described; `whole` with the same call, but all
parameters have their step before the next forward pass; `ddp` with PyTorch's own calls, a bucket each. The first two give the
same losses bit for bit. STRATA_ALLREDUCE_ALGO=two_trees has sums come down early; STRATA_SEGMENT_BYTES is the grain in which
they come.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from strata.torch import serves, wait_range
except ImportError:

    def serves(_group):
        """Without Strata all groups are of other backends."""
        return False


class Layer:
    """Parameters that have their step together, their gradients in the flat buffer, and their optimizer."""

    def __init__(self, name, parameters, make_optimizer):
        self.name = name
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters)
        # Set by the chain: all gradients in one, and in the shapes of the parameters.
        self.flat = None
        self.gradients = []

    def step(self):
        """The optimizer's step with the summed gradients. The local ones, which DDP has left, go."""
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Chain:
    """Sums the gradients of a model in one call, which the model's next forward pass follows.

        chain = Chain(model, make_optimizer)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(chain, Chain.hook)
        for ...: loss_of(model(inputs)).backward()      # no optimizer.step()
        chain.finish()                                  # before parameters are saved or looked at

    `make_optimizer(parameters)` makes the optimizer of one layer. A layer is a module that has parameters of its own, with
    all modules in it; parameters that several layers share belong to the first. Every layer has to run in every forward pass.
    What needs all gradients before the first step, such as clipping by their norm, is not possible.

    The call is on a group of its own: DDP's calls for buffers and buckets would wait behind it. All ranks make the chain.
    """

    def __init__(self, model, make_optimizer):
        self._group = dist.new_group()
        self._size = dist.get_world_size()
        self._follows = serves(self._group)
        self._layers = []
        self._work = None
        self._pending = []
        # When the call began and when the first layer could, for measurements.
        self.began = self.first_ready = 0.0
        owners = {}
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is None:
                continue
            everything = [parameter for parameter in module.parameters() if parameter.requires_grad]
            own = [parameter for parameter in everything if parameter not in owners]
            if own:
                self._layers.append(Layer(name, own, make_optimizer))
                owners.update((parameter, self._layers[-1]) for parameter in own)
            needed = list(dict.fromkeys(owners[parameter] for parameter in everything))
            module.register_forward_pre_hook(lambda _module, _inputs, needed=needed: self._before(needed))
        self._lay_out()

    def _lay_out(self):
        """Gives each layer its part of the buffer, in the order of the layers."""
        everything = [parameter for layer in self._layers for parameter in layer.parameters]
        dtypes = {parameter.dtype for parameter in everything}
        if len(dtypes) != 1:
            raise TypeError(f"all parameters must have one type, not {sorted(map(str, dtypes))}")
        self._flat = torch.zeros(sum(parameter.numel() for parameter in everything), dtype=everything[0].dtype)
        self._gradient_of, at = {}, 0
        for layer in self._layers:
            first = at
            for parameter in layer.parameters:
                gradient = self._flat[at : at + parameter.numel()].view(parameter.shape)
                self._gradient_of[parameter] = gradient
                layer.gradients.append(gradient)
                at += parameter.numel()
            layer.flat = self._flat[first:at]

    def hook(self, bucket):
        """What DDP calls for each bucket, the last layers' first: copies it, and begins the call after the last bucket."""
        if self._pending:
            names = ", ".join(repr(layer.name) for layer in self._pending)
            raise RuntimeError(f"no forward pass since the last step has run {names}: it computed with old parameters")
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            torch.div(gradient, self._size, out=self._gradient_of[parameter])
        if bucket.is_last():
            self.began = time.perf_counter()
            self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)
            self._pending = list(self._layers)
        # DDP does not wait, and leaves the local gradients to the parameters.
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def _before(self, needed):
        """A module is about to compute with the parameters of these layers."""
        for layer in needed:
            if layer in self._pending:
                if self._follows:
                    wait_range(layer.flat, self._group)
                else:
                    self._work.wait()
                self._step(layer)

    def _step(self, layer):
        if len(self._pending) == len(self._layers):
            self.first_ready = time.perf_counter()
        layer.step()
        self._pending.remove(layer)
        if not self._pending:
            self._work.wait()

    def finish(self):
        """Waits for the whole call and has all layers take their step."""
        if self._pending:
            self._work.wait()
        for layer in list(self._pending):
            self._step(layer)


def make_model(layers, width):
    """A model that is the same on every rank and in every way of training."""
    torch.manual_seed(1)
    parts = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def batch_of(options, step):
    """This rank's data for a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(options.batch, options.width, generator=generator)
    return inputs, torch.randint(10, (options.batch,), generator=generator)


def make_optimizer(parameters):
    """The optimizer of a layer, or of the whole model."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(way, options):
    """Losses, seconds of each step, and seconds from the beginning of each call until the first layer could begin."""
    model, chain, optimizer = make_model(options.layers, options.width), None, None
    if way == "ddp":
        optimizer = make_optimizer(model.parameters())
    else:
        chain = Chain(model, make_optimizer)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if chain is not None:
        model.register_comm_hook(chain, Chain.hook)
    losses, steps, first = [], [], []
    dist.barrier()
    begin = time.perf_counter()
    for step in range(options.steps):
        inputs, targets = batch_of(options, step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if chain is not None and step > 0:
            first.append(chain.first_ready - chain.began)
        loss.backward()
        if way == "whole":
            chain.finish()
        elif way == "ddp":
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        steps.append(time.perf_counter() - begin)
        begin += steps[-1]
    if chain is not None:
        chain.finish()
    # The first quarter warms up.
    warm = len(steps) // 4
    return losses, steps[warm:], first[warm:]


def main():
    """Trains in all ways; an exception where the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", default="strata")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    results = {way: train(way, options) for way in ("chain", "whole", "ddp")}
    if results["chain"][0] != results["whole"][0]:
        raise AssertionError(f"the losses differ: {results['chain'][0]} and {results['whole'][0]}")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.steps} steps; chain and whole give the same losses bit for bit")
        print(f"{'':8}{'last loss':>12}{'first layer at':>18}{'step':>12}    (medians of rank 0, ms)")
        for way, (losses, steps, first) in results.items():
            shown = f"{1e3 * statistics.median(first):.2f}" if first else "-"
            print(f"{way:8}{losses[-1]:12.6f}{shown:>18}{1e3 * statistics.median(steps):12.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
