"""Unchanged PyTorch, its backend nccl, over Strata on soft GPUs: each element of every result is compared.

One rank of a job, as torchrun or `strata launch` starts it:

    soft_torch.py seeds FIRST COUNT [CALL ...]    programs of these seeds without these calls; says of each rank
                                                  `SEEDS seeds, CALLS calls, WRONG wrong results`
    soft_torch.py dies                            the last rank ends in the middle; the others must hear of it

A seed chooses calls, groups, types, operations, shapes, streams, and the order in which the streams of the soft GPU do
their work. What a rank gives follows from the seed, so each rank knows what it must get. There are no kernels of PyTorch's
on a soft GPU but fills: the few that moving objects takes go by way of the host (`by_the_host`).
"""

import ctypes
import datetime
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MOVED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]
# PyTorch takes complex numbers apart for some calls and refuses them for others.
COMPLEX = [torch.complex64, torch.complex128]
REDUCED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
]
OPERATIONS = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0),
    dist.ReduceOp.PRODUCT: lambda parts: parts.prod(0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
    dist.ReduceOp.AVG: lambda parts: parts.sum(0) // len(parts),
}


def by_the_host(*names):
    """Has operations on tensors of the device computed by the host."""
    library = torch.library.Library("aten", "IMPL")
    for name in names:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def compute(*args, operation=operation, in_place=packet.endswith("_"), **options):
            host = tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
            found = operation(*host, **options)
            return args[0].copy_(found) if in_place else found.to(torch.cuda.current_device())

        library.impl(name, compute, "CUDA")
    return library


class Program:
    """The calls of one seed, within a group of ranks."""

    def __init__(self, seed, step, ranks, group, streams):
        self.random = random.Random(f"{seed} {step}")
        self.seed, self.step, self.ranks, self.group, self.streams = seed, step, ranks, group, streams
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.wrong, self.calls = [], 0

    # What ranks give ------------------------------------------------------------------------------------------------

    def numbers(self, rank, count, dtype, tag=0):
        """What a rank gives, on the host: small whole numbers, so that every order of a sum gives the same."""
        generator = torch.Generator().manual_seed(hash((self.seed, self.step, rank, tag)) & 0x7FFFFFFF)
        if dtype == torch.bool:
            return torch.randint(0, 2, (count,), generator=generator).bool()
        numbers = torch.randint(0, 4, (count,), generator=generator)
        return numbers.to(dtype)

    def shared(self, rank, count, dtype, tag=0):
        """The same, divisible by the number of ranks, for averages."""
        return self.numbers(rank, count, dtype, tag) * len(self.ranks)

    def on_device(self, host):
        """Host memory on the device: by way of pinned memory, from pageable memory, or filled where one value will do."""
        way = self.random.randrange(3)
        if way == 0:
            return host.pin_memory().to(self.device, non_blocking=True)
        if way == 1:
            return host.to(self.device)
        device = torch.full(host.shape, 1, dtype=host.dtype, device=self.device)
        device.copy_(host.pin_memory(), non_blocking=True)
        return device

    def room(self, count, dtype):
        return torch.full((count,), 1, dtype=dtype, device=self.device)

    def count(self):
        """How many elements: few, odd, or many."""
        return self.random.choice([1, 3, self.random.randrange(2, 100), self.random.randrange(100, 5000),
                                   self.random.randrange(5000, 120000)])

    def me(self):
        return self.ranks.index(RANK)

    # Looking at results ---------------------------------------------------------------------------------------------

    def check(self, what, got, expected):
        got, expected = got.cpu().contiguous(), expected.contiguous()
        if got.dtype != torch.bool:
            got, expected = got.view(torch.uint8), expected.view(torch.uint8)
        if not torch.equal(got, expected):
            bad = (got != expected).sum().item() if got.shape == expected.shape else -1
            self.wrong.append(f"seed {self.seed} step {self.step} rank {RANK} of {self.ranks}: {what}: {bad} bytes wrong")

    def wait(self, work):
        """Has the current stream wait, or the host too."""
        if work is None:
            return
        if self.random.randrange(3) == 0:
            while not work.is_completed():
                pass
        work.wait()

    # Calls ----------------------------------------------------------------------------------------------------------

    def reduction(self):
        dtype, operation = self.random.choice(REDUCED), self.random.choice(list(OPERATIONS))
        return dtype, operation, lambda parts: OPERATIONS[operation](torch.stack(parts).to(torch.int64)).to(dtype)

    def all_reduce(self):
        count, (dtype, operation, reduce) = self.count(), self.reduction()
        parts = [self.shared(rank, count, dtype) for rank in self.ranks]
        tensor = self.on_device(parts[self.me()])
        self.wait(dist.all_reduce(tensor, operation, self.group, async_op=self.random.random() < 0.5))
        self.check(f"all_reduce {dtype} {operation} {count}", tensor, reduce(parts))

    def all_reduce_scaled(self):
        count, dtype = self.count(), self.random.choice([torch.float32, torch.float64, torch.float16])
        parts = [self.numbers(rank, count, dtype) for rank in self.ranks]
        tensor = self.on_device(parts[self.me()])
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0), self.group)
        self.check(f"all_reduce premul {dtype} {count}", tensor, (torch.stack(parts) * 2).sum(0).to(dtype))

    def reduce(self):
        count, (dtype, operation, reduce), root = self.count(), self.reduction(), self.random.choice(self.ranks)
        parts = [self.shared(rank, count, dtype) for rank in self.ranks]
        tensor = self.on_device(parts[self.me()])
        self.wait(dist.reduce(tensor, root, operation, self.group, async_op=True))
        if RANK == root:
            self.check(f"reduce {dtype} {operation} {count}", tensor, reduce(parts))

    def broadcast(self):
        count, dtype, root = self.count(), self.random.choice(MOVED + COMPLEX), self.random.choice(self.ranks)
        tensor = self.on_device(self.numbers(RANK, count, dtype))
        self.wait(dist.broadcast(tensor, root, self.group, async_op=True))
        self.check(f"broadcast {dtype} {count}", tensor, self.numbers(root, count, dtype))

    def all_gather(self):
        dtype, uneven = self.random.choice(MOVED), self.random.random() < 0.5
        counts = [self.count() for _ in self.ranks] if uneven else [self.count()] * len(self.ranks)
        rooms = [self.room(count, dtype) for count in counts]
        tensor = self.on_device(self.numbers(RANK, counts[self.me()], dtype))
        self.wait(dist.all_gather(rooms, tensor, self.group, async_op=True))
        for rank, count, room in zip(self.ranks, counts, rooms):
            self.check(f"all_gather {dtype} {counts}", room, self.numbers(rank, count, dtype))

    def all_gather_into_tensor(self):
        count, dtype = self.count(), self.random.choice(MOVED + COMPLEX)
        room = self.room(count * len(self.ranks), dtype)
        tensor = self.on_device(self.numbers(RANK, count, dtype))
        self.wait(dist.all_gather_into_tensor(room, tensor, self.group, async_op=True))
        expected = torch.cat([self.numbers(rank, count, dtype) for rank in self.ranks])
        self.check(f"all_gather_into_tensor {dtype} {count}", room, expected)

    def reduce_scatter(self):
        count, (dtype, operation, reduce) = self.count(), self.reduction()
        all_parts = [[self.shared(rank, count, dtype, to) for rank in self.ranks] for to in range(len(self.ranks))]
        mine = [self.on_device(parts[self.me()]) for parts in all_parts]
        room = self.room(count, dtype)
        self.wait(dist.reduce_scatter(room, mine, operation, self.group, async_op=True))
        self.check(f"reduce_scatter {dtype} {operation} {count}", room, reduce(all_parts[self.me()]))

    def reduce_scatter_tensor(self):
        count, (dtype, operation, reduce) = self.count(), self.reduction()
        parts = [self.shared(rank, count * len(self.ranks), dtype) for rank in self.ranks]
        room = self.room(count, dtype)
        tensor = self.on_device(parts[self.me()])
        self.wait(dist.reduce_scatter_tensor(room, tensor, operation, self.group, async_op=True))
        expected = reduce(parts)[self.me() * count :][:count]
        self.check(f"reduce_scatter_tensor {dtype} {operation} {count}", room, expected)

    def all_to_all_single(self):
        dtype, uneven, size = self.random.choice(MOVED), self.random.random() < 0.7, len(self.ranks)
        same = self.count()
        # splits[from][to]; some are empty.
        splits = [[self.random.choice([0, self.count()]) if uneven else same for _ in range(size)] for _ in range(size)]
        me = self.me()
        sent, received = splits[me], [splits[rank][me] for rank in range(size)]
        given = [self.numbers(rank, sum(splits[index]), dtype) for index, rank in enumerate(self.ranks)]
        expected = torch.cat([given[index][sum(splits[index][:me]) :][: splits[index][me]] for index in range(size)])
        room, tensor = self.room(sum(received), dtype), self.on_device(given[me])
        self.wait(dist.all_to_all_single(room, tensor, received, sent, self.group, async_op=True))
        self.check(f"all_to_all_single {dtype} {splits}", room, expected)

    def all_to_all(self):
        dtype, size, me = self.random.choice(MOVED), len(self.ranks), self.me()
        splits = [[self.count() for _ in range(size)] for _ in range(size)]
        given = [self.on_device(self.numbers(RANK, splits[me][to], dtype, to)) for to in range(size)]
        rooms = [self.room(splits[index][me], dtype) for index in range(size)]
        self.wait(dist.all_to_all(rooms, given, self.group, async_op=True))
        for index, rank in enumerate(self.ranks):
            self.check(f"all_to_all {dtype}", rooms[index], self.numbers(rank, splits[index][me], dtype, me))

    def gather(self):
        count, dtype, root = self.count(), self.random.choice(MOVED), self.random.choice(self.ranks)
        rooms = [self.room(count, dtype) for _ in self.ranks] if RANK == root else None
        tensor = self.on_device(self.numbers(RANK, count, dtype))
        self.wait(dist.gather(tensor, rooms, root, self.group, async_op=True))
        for rank, room in zip(self.ranks, rooms or []):
            self.check(f"gather {dtype} {count}", room, self.numbers(rank, count, dtype))

    def scatter(self):
        count, dtype, root = self.count(), self.random.choice(MOVED), self.random.choice(self.ranks)
        given = [self.on_device(self.numbers(root, count, dtype, to)) for to in self.ranks] if RANK == root else None
        room = self.room(count, dtype)
        self.wait(dist.scatter(room, given, root, self.group, async_op=True))
        self.check(f"scatter {dtype} {count}", room, self.numbers(root, count, dtype, RANK))

    def send_and_receive(self):
        count, dtype = self.count(), self.random.choice(MOVED)
        if len(self.ranks) == 1:
            return
        sender, receiver = self.random.sample(self.ranks, 2)
        if RANK == sender:
            dist.send(self.on_device(self.numbers(RANK, count, dtype)), receiver, self.group)
        elif RANK == receiver:
            room = self.room(count, dtype)
            dist.recv(room, sender, self.group)
            self.check(f"recv {dtype} {count} from {sender}", room, self.numbers(sender, count, dtype))

    def ring(self):
        count, dtype, size = self.count(), self.random.choice(MOVED), len(self.ranks)
        after, before = self.ranks[(self.me() + 1) % size], self.ranks[self.me() - 1]
        room, tensor = self.room(count, dtype), self.on_device(self.numbers(RANK, count, dtype))
        calls = [dist.P2POp(dist.isend, tensor, after, self.group), dist.P2POp(dist.irecv, room, before, self.group)]
        if self.random.random() < 0.5:
            calls.reverse()
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        self.check(f"ring {dtype} {count}", room, self.numbers(before, count, dtype))

    def coalesced_reductions(self):
        counts, dtype = [self.count() for _ in range(self.random.randrange(2, 5))], self.random.choice(REDUCED)
        parts = [[self.numbers(rank, count, dtype, tag) for rank in self.ranks] for tag, count in enumerate(counts)]
        tensors = [self.on_device(part[self.me()]) for part in parts]
        with dist._coalescing_manager(self.group, self.device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)
        manager.wait()
        for part, tensor in zip(parts, tensors):
            expected = torch.stack(part).to(torch.int64).sum(0).to(dtype)
            self.check(f"coalesced all_reduce {dtype} {counts}", tensor, expected)

    def coalesced_gathers(self):
        counts, dtype = [self.count() for _ in range(self.random.randrange(2, 4))], self.random.choice(MOVED)
        rooms = [self.room(count * len(self.ranks), dtype) for count in counts]
        given = [self.on_device(self.numbers(RANK, count, dtype, tag)) for tag, count in enumerate(counts)]
        with dist._coalescing_manager(self.group, self.device):
            for room, tensor in zip(rooms, given):
                dist.all_gather_into_tensor(room, tensor, group=self.group)
        for tag, (count, room) in enumerate(zip(counts, rooms)):
            expected = torch.cat([self.numbers(rank, count, dtype, tag) for rank in self.ranks])
            self.check(f"coalesced all_gather {dtype} {counts}", room, expected)

    def objects(self):
        mine = lambda rank: {"rank": rank, "text": "x" * (rank * 100 + self.step), "list": list(range(rank))}
        everyones = [mine(rank) for rank in self.ranks]
        root, gathered = self.random.choice(self.ranks), [None] * len(self.ranks)
        dist.all_gather_object(gathered, mine(RANK), self.group)
        told = [mine(root), self.step] if RANK == root else [None, None]
        dist.broadcast_object_list(told, root, self.group)
        scattered = [None]
        dist.scatter_object_list(scattered, everyones if RANK == root else None, root, self.group)
        at_root = [None] * len(self.ranks) if RANK == root else None
        dist.gather_object(mine(RANK), at_root, root, self.group)
        found = [gathered, told, scattered, at_root]
        if found != [everyones, [mine(root), self.step], [mine(RANK)], everyones if RANK == root else None]:
            self.wrong.append(f"seed {self.seed} step {self.step}: objects: {found}")

    def barrier(self):
        dist.barrier(self.group)

    def fills(self):
        """No call of the library: what all the others begin with."""
        count, dtype = self.count(), self.random.choice(MOVED + COMPLEX)
        self.check(f"full {dtype} {count}", torch.full((count,), 1, dtype=dtype, device=self.device), torch.ones(count, dtype=dtype))

    def under_way(self):
        """Several calls at once, one after another on the library's stream, each looked at only when all are asked for."""
        count, dtype = self.count(), self.random.choice(REDUCED)
        tags = range(self.random.randrange(2, 6))
        tensors = [self.on_device(self.numbers(RANK, count, dtype, tag)) for tag in tags]
        works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]
        order = list(tags)
        self.random.shuffle(order)
        for tag in order:
            works[tag].wait()
            parts = torch.stack([self.numbers(rank, count, dtype, tag) for rank in self.ranks])
            self.check(f"call {tag} of several {dtype} {count}", tensors[tag], parts.to(torch.int64).sum(0).to(dtype))

    def graph(self):
        """What a graph has copied, captured once and run on other numbers, is reduced."""
        count, dtype = self.count(), torch.float32
        given, tensor, graph = self.room(count, dtype), self.room(count, dtype), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            tensor.fill_(1)
            tensor.copy_(given)
        for tag in range(3):
            given.copy_(self.numbers(RANK, count, dtype, tag).pin_memory(), non_blocking=True)
            graph.replay()
            dist.all_reduce(tensor, group=self.group)
            expected = torch.stack([self.numbers(rank, count, dtype, tag) for rank in self.ranks]).sum(0)
            self.check(f"all_reduce after a graph {count}", tensor, expected)
        graph.reset()

    CALLS = [
        all_reduce, all_reduce_scaled, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter,
        reduce_scatter_tensor, all_to_all_single, all_to_all, gather, scatter, send_and_receive, ring,
        coalesced_reductions, coalesced_gathers, objects, barrier, fills, under_way,
        graph,
    ]

    def run(self, call):
        stream = self.random.choice(self.streams)
        with torch.cuda.stream(stream):
            call(self)
        self.calls += 1


def pool_of_nccl(seed, step, group):
    """Buffers from the library's own allocator, registered with it."""
    program = Program(seed, step, list(range(SIZE)), group, [torch.cuda.current_stream()])
    backend = dist.group.WORLD._get_backend(program.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        count = program.random.choice([program.random.randrange(1000, 500000), 6000001])
        tensor = torch.full((count,), 1.0, device=program.device)
    backend.register_mem_pool(pool)
    dist.all_reduce(tensor, group=group)
    program.check("all_reduce of a pool's memory", tensor, torch.full((tensor.numel(),), float(SIZE)))
    backend.deregister_mem_pool(pool)
    del tensor
    return program


def groups_of(seed):
    """Groups that a seed chooses; all ranks make all of them."""
    choice = random.Random(f"groups {seed}")
    groups = [(list(range(SIZE)), None)]
    for _ in range(2):
        ranks = sorted(choice.sample(range(SIZE), choice.randrange(2, SIZE + 1)))
        groups.append((ranks, dist.new_group(ranks)))
    halves = [list(range(0, SIZE, 2)), list(range(1, SIZE, 2))]
    mine = dist.split_group(split_ranks=halves)
    groups.append((halves[RANK % 2], mine))
    return groups


def run_seed(seed, soft, left_out):
    """The calls of a seed: every kind once, and some more, in an order that the seed chooses."""
    soft.softgpuSeed(seed)
    choice = random.Random(f"order {seed}")
    known = [call for call in Program.CALLS if call.__name__ not in left_out]
    calls = known + [choice.choice(known) for _ in range(6)]
    choice.shuffle(calls)
    groups = groups_of(seed)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    wrong, count = [], 0
    for step, call in enumerate(calls):
        number = choice.randrange(len(groups))
        ranks, group = groups[number]
        if RANK not in ranks:
            continue
        program = Program(seed, step * 10 + (RANK % 2 if number == 3 else 0), ranks, group, streams)
        program.run(call)
        wrong += program.wrong
        count += program.calls
    program = pool_of_nccl(seed, 10000, None)
    for _, group in groups[1:]:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return wrong + program.wrong, count + 1


def dies():
    """The last rank ends without a word; the others' call must fail, and say of what."""
    tensor = torch.full((1000,), 1.0, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if RANK == SIZE - 1:
        os._exit(0)
    try:
        for _ in range(1000):
            dist.all_reduce(tensor, async_op=True).wait()
            torch.cuda.synchronize()
    except Exception as error:
        os.write(1, f"rank {RANK}: {type(error).__name__}: {error}\n".encode())
        os._exit(0)
    os._exit(1)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kept = by_the_host("add.Tensor", "add_.Tensor", "cat", "gt.Tensor", "max", "sum", "sum.dim_IntList")
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120), device_id=device)
    if sys.argv[1] == "dies":
        dies()
    first, seeds = int(sys.argv[2]), int(sys.argv[3])
    soft, wrong, calls = ctypes.CDLL("libcuda.so.1"), [], 0
    for seed in range(first, first + seeds):
        some, count = run_seed(seed, soft, sys.argv[4:])
        wrong, calls = wrong + some, calls + count
    said = wrong[:20] + [f"rank {RANK}: {seeds} seeds, {calls} calls, {len(wrong)} wrong results"]
    # At once: the ranks share the output.
    os.write(1, "".join(line + "\n" for line in said).encode())
    dist.destroy_process_group()
    del kept
    sys.exit(1 if wrong else 0)


main()
