"""DeepSpeed's collectives by mcr_dl: each of deepspeed.comm's operations goes by the backend that a route names.

    from strata.mcr_dl.deepspeed import init_distributed
    init_distributed(["nccl", "mpi"], routes={"all_to_all_single": "mpi"})

DeepSpeed keeps an object through which all of its communication goes, a wrapper of torch.distributed. In its place comes a subclass,
which makes collectives of tensors in host memory by mcr_dl. Messages, objects, barriers and tensors elsewhere stay with torch.distributed.
Each group of ranks has backends of its own, made at its first collective.
"""

import collections
import difflib

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm as _comm
from deepspeed.comm.torch import TorchBackend

from ._backends import meet_by_store
from ._names import AUTO, CARRIERS, is_algorithm, listed, unknown
from ._world import World

# Collectives that a route may name.
OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "scatter",
)


def init_distributed(backends=AUTO, routes=None, dist_backend="strata", timeout=None, **options) -> "McrBackend":
    """`deepspeed.init_distributed`, after which DeepSpeed's collectives in host memory go by mcr_dl.

    `backends`: those that `mcr_dl.init` takes. `routes`: a backend for each operation of OPERATIONS; others, and all without
    routes, go by "auto". `dist_backend` is torch.distributed's, for what is no collective. `timeout`: mcr_dl's, in seconds.
    """
    backends, routes = listed(backends), dict(routes or {})
    for operation, backend in routes.items():
        if operation not in OPERATIONS:
            near = difflib.get_close_matches(operation, OPERATIONS, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"mcr_dl: there is no operation {operation!r} to route; {meant}there are {', '.join(OPERATIONS)}")
        if not (backend in backends or backend == AUTO or is_algorithm(backend)):
            known = tuple(dict.fromkeys((*backends, AUTO)))
            if backend in CARRIERS:
                raise ValueError(f"mcr_dl: {operation} goes by {backend!r}, which is not among the backends {', '.join(known)}")
            raise unknown(backend, known)
    deepspeed.init_distributed(dist_backend=dist_backend, **options)
    made = McrBackend.over(_comm.cdb, backends, routes, timeout)
    _comm.cdb = made
    return made


class _Copied:
    """A call whose results are copied to tensors that are not contiguous when it has ended."""

    def __init__(self, work, copies):
        self._work = work
        self._copies = copies

    def wait(self, *arguments, **options):
        if self._work is not None:
            self._work.wait(*arguments, **options)
        for tensor, plain in self._copies:
            tensor.copy_(plain)
        self._copies = []
        return True

    def is_completed(self):
        """Whether the results are where they belong, which `wait` sees to."""
        return not self._copies


class McrBackend(TorchBackend):
    """DeepSpeed's wrapper of torch.distributed, with collectives by mcr_dl."""

    @classmethod
    def over(cls, there, backends, routes, timeout):
        """One in the place of DeepSpeed's own, with all that this has."""
        made = cls.__new__(cls)
        made.__dict__.update(there.__dict__)
        made._backends = backends
        made._routes = routes
        made._timeout = timeout
        made._worlds = {}
        # How many collectives went by mcr_dl, by operation and backend.
        made.calls = collections.Counter()
        return made

    def _world(self, group) -> World:
        """The backends of a group's ranks."""
        group = dist.group.WORLD if group is None else group
        name = group.group_name
        world = self._worlds.get(name)
        if world is None:
            store = dist.distributed_c10d._get_default_store()
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            world = World(lambda: meet_by_store(store, f"mcr_dl/{name}", rank, size))
            world.init(self._backends, timeout=self._timeout)
            self._worlds[name] = world
        return world

    @staticmethod
    def _is_ours(group, *tensors) -> bool:
        """Whether mcr_dl makes the call. The answer is the same on all ranks."""
        return group is not dist.GroupMember.NON_GROUP_MEMBER and all(tensor.is_cpu for tensor in tensors)

    def _do(self, operation, group, call, written, read, async_op):
        """Makes `call(functions, backend, written, read)` with contiguous tensors; copies back to those that are not."""
        backend = self._routes.get(operation, AUTO)
        world = self._world(group)
        self.calls[operation, backend] += 1
        copies, targets = [], []
        for tensor in written:
            plain = tensor.detach()
            if not plain.is_contiguous():
                plain = plain.contiguous()
                copies.append((tensor.detach(), plain))
            targets.append(plain)
        sources = [tensor.detach().contiguous() for tensor in read]
        work = call(world, backend, targets, sources)
        if not copies:
            return work
        copied = _Copied(work, copies)
        if async_op:
            return copied
        copied.wait()
        return None

    def _root(self, group, rank) -> int:
        return rank if group is None or group is dist.group.WORLD else dist.get_group_rank(group, rank)

    # Reductions.

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not self._is_ours(group, tensor):
            return super().all_reduce(tensor, op, group, async_op)
        call = lambda world, backend, to, _: world.all_reduce(backend, to[0], op, async_op)
        return self._do("all_reduce", group, call, [tensor], [], async_op)

    def inference_all_reduce(self, tensor, op, group=None):
        return self.all_reduce(tensor, op, group)

    def all_reduce_coalesced(self, tensors, op=dist.ReduceOp.SUM, group=None, async_op=False):
        works = [self.all_reduce(tensor, op, group, async_op) for tensor in tensors]
        return _All(works) if async_op else None

    def reduce(self, tensor, dst, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not self._is_ours(group, tensor):
            return super().reduce(tensor, dst, op, group, async_op)
        root = self._root(group, dst)
        call = lambda world, backend, to, _: world.reduce(backend, to[0], root, op, async_op)
        return self._do("reduce", group, call, [tensor], [], async_op)

    def reduce_scatter_tensor(self, output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not self._is_ours(group, output_tensor, input_tensor):
            return super().reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        call = lambda world, backend, to, of: world.reduce_scatter(backend, to[0], None, op, async_op, input=of[0])
        return self._do("reduce_scatter_tensor", group, call, [output_tensor], [input_tensor], async_op)

    def reduce_scatter(self, output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        even = all(tensor.numel() == output.numel() for tensor in input_list)
        # All ranks have the same sizes, or one of them has another one than its own, which mcr_dl would refuse alone.
        if not even or not self._is_ours(group, output, *input_list):
            return super().reduce_scatter(output, input_list, op, group, async_op)
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in input_list])
        call = lambda world, backend, to, of: world.reduce_scatter(backend, to[0], None, op, async_op, input=of[0])
        return self._do("reduce_scatter", group, call, [output], [whole], async_op)

    # Copies.

    def broadcast(self, tensor, src, group=None, async_op=False):
        if not self._is_ours(group, tensor):
            return super().broadcast(tensor, src, group, async_op)
        root = self._root(group, src)
        call = lambda world, backend, to, _: world.bcast(backend, to[0], root, async_op)
        return self._do("broadcast", group, call, [tensor], [], async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        if not self._is_ours(group, output_tensor, input_tensor):
            return super().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        call = lambda world, backend, to, of: world.all_gather(backend, to[0], of[0], async_op)
        return self._do("all_gather_into_tensor", group, call, [output_tensor], [input_tensor], async_op)

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        if not self._is_ours(group, tensor, *tensor_list):
            return super().all_gather(tensor_list, tensor, group, async_op)
        counts = [part.numel() for part in tensor_list]
        whole = tensor.new_empty(sum(counts))
        parts = [(part.detach(), block.view(part.shape)) for part, block in zip(tensor_list, whole.split(counts))]

        def call(world, backend, _to, of):
            work = world.all_gatherv(backend, whole, None, counts, None, async_op, input=of[0])
            copied = _Copied(work, parts)
            return copied if async_op else copied.wait()

        work = self._do("all_gather", group, call, [], [tensor], async_op)
        return work if async_op else None

    def all_gather_coalesced(self, output_tensors, input_tensors, group=None, async_op=False):
        works = [self.all_gather_into_tensor(*pair, group, async_op) for pair in zip(output_tensors, input_tensors)]
        return _All(works) if async_op else None

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        if not self._is_ours(group, output, input):
            return super().all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
        # Ranks need not agree on whether they have sizes: blocks of the same size may come of both.
        size = dist.get_world_size(group)
        counts = [_elements(tensor, sizes, size) for tensor, sizes in ((input, input_split_sizes), (output, output_split_sizes))]
        call = lambda world, backend, to, of: world.all_to_allv(backend, to[0], of[0], *counts, async_op=async_op)
        return self._do("all_to_all_single", group, call, [output], [input], async_op)

    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        if not self._is_ours(group, *output_tensor_list, *input_tensor_list):
            return super().all_to_all(output_tensor_list, input_tensor_list, group, async_op)
        call = lambda world, backend, to, of: world.all_to_all(backend, to, of, async_op)
        return self._do("all_to_all", group, call, output_tensor_list, input_tensor_list, async_op)

    def gather(self, tensor, gather_list=None, dst=0, group=None, async_op=False):
        if not self._is_ours(group, tensor):
            return super().gather(tensor, gather_list, dst, group, async_op)
        root, whole, parts = self._root(group, dst), None, []
        if dist.get_rank(group) == root:
            whole = tensor.new_empty((len(gather_list), *tensor.shape))
            parts = list(zip((part.detach() for part in gather_list), whole.unbind(0)))

        def call(world, backend, _to, of):
            copied = _Copied(world.gather(backend, whole, root, async_op, input=of[0]), parts)
            return copied if async_op else copied.wait()

        work = self._do("gather", group, call, [], [tensor], async_op)
        return work if async_op else None

    def scatter(self, tensor, scatter_list=None, src=0, group=None, async_op=False):
        if not self._is_ours(group, tensor):
            return super().scatter(tensor, scatter_list, src, group, async_op)
        root = self._root(group, src)
        whole = [torch.stack([part.detach() for part in scatter_list])] if dist.get_rank(group) == root else []
        call = lambda world, backend, to, of: world.scatter(backend, to[0], root, async_op, input=of[0] if of else None)
        return self._do("scatter", group, call, [tensor], whole, async_op)

    def destroy_process_group(self, group=None):
        every = group is None or group is dist.group.WORLD
        names = list(self._worlds) if every else [getattr(group, "group_name", None)]
        for name in names:
            world = self._worlds.pop(name, None)
            if world is not None:
                world.finalize()
        return super().destroy_process_group(group)


class _All:
    """Several calls as one."""

    def __init__(self, works):
        self._works = works

    def wait(self, *arguments, **options):
        for work in self._works:
            work.wait(*arguments, **options)
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self._works)


def _elements(tensor, sizes, ranks) -> "list[int]":
    """Elements of each rank's part of a tensor that is split along its first dimension; by equal parts without sizes."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % ranks:
            raise ValueError(f"mcr_dl: all_to_all_single: {rows} rows cannot be split for {ranks} ranks")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ValueError(f"mcr_dl: all_to_all_single: split sizes {list(sizes)} are none of {rows} rows for {ranks} ranks")
    row = tensor.numel() // rows if rows else 0
    return [each * row for each in sizes]
