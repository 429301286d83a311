"""What Strata's group does and gloo's does not, or does wrong: uneven lists, strided tensors, tags, splits and ends.

Every function runs on each rank of a test.
"""

import os
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist


def _begin(**options):
    dist.init_process_group("strata", **options)
    return dist.get_rank(), dist.get_world_size()


def _raises(kind, pattern, call):
    try:
        call()
    except kind as error:
        missing = [word for word in pattern if word not in str(error)]
        assert not missing, f"the message lacks {missing}: {error}"
        return error
    raise AssertionError(f"no exception, where one with {pattern} was due")


def uneven_lists():
    rank, size = _begin()
    outputs = [torch.zeros(r + 1, 2) for r in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
    assert all(torch.equal(output, torch.full((r + 1, 2), float(r))) for r, output in enumerate(outputs))

    inputs = [torch.full((r + 1,), rank + r, dtype=torch.int64) for r in range(size)]
    output = torch.zeros(rank + 1, dtype=torch.int64)
    dist.reduce_scatter(output, inputs)
    assert output.tolist() == [sum(range(size)) + size * rank] * (rank + 1)

    for later in (False, True):
        parts = [torch.full((rank + r, 3), 10 * rank + r, dtype=torch.int16) for r in range(size)]
        results = [torch.zeros(rank + r, 3, dtype=torch.int16) for r in range(size)]
        work = dist.all_to_all(results, parts, async_op=later)
        if later:
            work.wait()
        for r, result in enumerate(results):
            assert torch.equal(result, torch.full((rank + r, 3), 10 * r + rank, dtype=torch.int16))
    dist.destroy_process_group()


def strided_tensors():
    rank, size = _begin()
    for later in (False, True):
        base = torch.arange(12.0).view(3, 4) + rank
        expected = size * torch.arange(12.0).view(3, 4).t() + sum(range(size))
        view = base.t()
        work = dist.all_reduce(view, async_op=later)
        if later:
            work.wait()
        assert torch.equal(view, expected) and torch.equal(base, expected.t())

        wide = torch.zeros(2 * size, 4)
        work = dist.all_gather_into_tensor(wide[:, ::2], torch.full((4, 2), float(rank)).t()[:, :2], async_op=later)
        if later:
            work.wait()
        assert torch.equal(wide[:, ::2], torch.arange(size).repeat_interleave(2).float()[:, None].expand(-1, 2))
        assert wide[:, 1::2].count_nonzero() == 0

        column = torch.zeros(3, 2)
        if rank == 0:
            dist.send(torch.arange(6.0).view(2, 3).t()[:, 1], 1)
        if rank == 1:
            dist.recv(column[:, 1], 0)
            assert column.tolist() == [[0, 3], [0, 4], [0, 5]]
    image = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank)).to(memory_format=torch.channels_last)
    seen = image.clone()
    dist.broadcast(seen, 1)
    if rank == 1:
        assert torch.equal(seen, image)
    whole = torch.stack([torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))])[0]
    assert torch.equal(seen, whole)
    # Two queued calls on one strided tensor, the second on what the first has left.
    twice = torch.ones(3, 4).t()
    first, second = dist.all_reduce(twice, async_op=True), dist.all_reduce(twice, async_op=True)
    first.wait(), second.wait()
    assert twice.eq(size * size).all()
    dist.destroy_process_group()


def lazily_conjugated():
    rank, size = _begin()
    data = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    total = sum(range(1, size + 1))
    outputs = [torch.zeros(2, dtype=torch.complex64) for _ in range(size)]
    dist.all_gather(outputs, data.conj().clone())
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    conjugated = data.conj()
    assert conjugated.is_conj()
    backend.allreduce([conjugated]).wait()
    assert torch.equal(conjugated.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]) * total)
    dist.destroy_process_group()


def logic_and_factors():
    rank, size = _begin()
    op = dist.ReduceOp
    for kind, expected in ((op.SUM, [True, True]), (op.MAX, [True, True]), (op.PRODUCT, [False, True]), (op.MIN, [False, True])):
        data = torch.tensor([rank == 0, True])
        dist.all_reduce(data, kind)
        assert data.tolist() == expected and data.dtype is torch.bool
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        data = torch.full((5,), rank + 1, dtype=dtype)
        dist.all_reduce(data, dist._make_nccl_premul_sum(0.5))
        assert data.eq(sum(range(1, size + 1)) / 2).all(), data
        out = torch.zeros(2, dtype=dtype)
        dist.reduce_scatter_tensor(out, torch.full((2 * size,), 3, dtype=dtype), dist._make_nccl_premul_sum(torch.tensor([2.0])))
        assert out.eq(6 * size).all()
    pair = torch.tensor([1 + 1j, 2j]) * (rank + 1)
    dist.all_reduce(pair, op.AVG)
    assert torch.allclose(pair, torch.tensor([1 + 1j, 2j]) * (size + 1) / 2)
    dist.destroy_process_group()


def order_of_tags():
    rank, _size = _begin()
    one, two = torch.zeros(1 << 20), torch.zeros(3)
    if rank == 0:
        works = [dist.isend(torch.ones(1 << 20), 1, tag=1), dist.isend(torch.full((3,), 2.0), 1, tag=2)]
        [work.wait() for work in works]
    if rank == 1:
        dist.recv(two, 0, tag=2)
        dist.recv(one, 0, tag=1)
        assert two.tolist() == [2.0] * 3 and one.eq(1).all()
    # A message that nobody has taken yet holds up neither a collective nor another direction.
    peer = 1 - rank
    if rank < 2:
        sent = dist.isend(torch.full((1 << 20,), float(rank)), peer, tag=5)
        dist.recv(one, peer, tag=5)
        assert one.eq(peer).all()
        sent.wait()
        late = dist.isend(torch.ones(1 << 20), peer, tag=6)
    dist.barrier()
    if rank < 2:
        dist.recv(one, peer, tag=6)
        late.wait()
        mine = torch.zeros(4)
        works = [dist.isend(torch.arange(4.0), rank), dist.irecv(mine, rank)]
        [work.wait() for work in works]
        assert mine.tolist() == [0, 1, 2, 3]
    dist.destroy_process_group()


def futures_and_hooks():
    rank, size = _begin()
    data = torch.ones(4)
    future = dist.all_reduce(data, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().eq(2 * size).all() and future.done()

    # A callback that makes a call and waits for it, while more are queued behind the first.
    nested = torch.ones(2)

    def again(_done):
        dist.all_reduce(nested, async_op=True).get_future().wait()
        return nested.clone()

    futures = []
    for _ in range(3):
        futures.append(dist.all_reduce(torch.ones(2), async_op=True).get_future())
    result = futures[0].then(again).wait()
    assert result.eq(size).all()
    [future.wait() for future in futures]

    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work.wait() and work.get_future().done()
    # A call at once comes after those that are queued.
    first, second = torch.ones(1 << 18), torch.ones(1 << 18)
    queued = [dist.all_reduce(first, async_op=True) for _ in range(4)]
    dist.all_reduce(second)
    assert first.eq(float(size**4)).all() and second.eq(size).all()
    [work.wait() for work in queued]
    dist.destroy_process_group()


def many_threads():
    rank, size = _begin()
    groups = [dist.new_group(backend="strata") for _ in range(4)]
    failures = []

    def use(group, number):
        try:
            for step in range(50):
                data = torch.full((100,), float(number + step))
                work = dist.all_reduce(data, group=group, async_op=step % 2 == 0)
                if work is not None:
                    work.wait()
                assert data.eq(size * (number + step)).all()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=pair) for pair in zip(groups, range(4))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures
    dist.destroy_process_group()


def threads_of_one_group():
    """Calls of several threads come one after another; their order does not matter where all are the same."""
    rank, size = _begin()
    failures = []

    def use(number):
        try:
            for step in range(40):
                data = torch.full((500,), 1.0)
                view = data.view(20, 25).t() if (number + step) % 3 == 0 else data
                work = dist.all_reduce(view, async_op=(number + step) % 2 == 0)
                if work is not None:
                    work.wait()
                assert data.eq(size).all(), data
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures
    dist.destroy_process_group()


def shutdown_beside_a_call():
    """A group ends when the call of another thread has ended."""
    rank, size = _begin()
    dist.barrier()
    data, failures, begun = torch.ones(1 << 16), [], threading.Event()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def call():
        begun.set()
        try:
            dist.all_reduce(data)
        except Exception as error:
            failures.append(error)

    if rank == 0:
        time.sleep(1)
    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    if rank == 0:
        thread.join()
    else:
        # The call has begun and waits for rank 0, which comes later.
        time.sleep(0.3)
    backend.shutdown()
    thread.join()
    assert not failures, failures
    assert data.eq(size).all()


def dropped_batch():
    """An exception in the middle of a batch leaves what was before it, and nothing that takes what comes later."""
    rank, size = _begin()
    peer = 1 - rank
    if rank < 2:
        mine, other = torch.full((3,), float(rank)), torch.zeros(3)
        wrong = [dist.P2POp(dist.isend, mine, peer, tag=1), dist.P2POp(dist.irecv, other, peer, tag=-1)]
        _raises(ValueError, ["recv", f"rank {rank} of {size}", "negative"], lambda: dist.batch_isend_irecv(wrong))
        for tag in (1, 0):
            works = [dist.irecv(other.zero_(), peer, tag=tag)]
            # The first message of the batch has been sent.
            works += [dist.isend(mine, peer)] if tag == 0 else []
            [work.wait() for work in works]
            assert other.eq(peer).all()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    data = torch.ones(2)
    backend.allreduce([data]).wait()
    assert data.eq(size).all()


def failed_copy():
    """A call that raises while it is made ends its time limit as well."""
    import strata.torch._group as group

    rank, size = _begin(timeout=timedelta(minutes=5))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.5)
    copy_all = group.copy_all

    def fails(_pairs):
        raise MemoryError("no memory")

    for later in (False, True):
        options.asyncOp = later
        group.copy_all = fails
        call = lambda: backend.allreduce([torch.ones(3, 4).t()], options).wait()
        _raises(RuntimeError, ["all_reduce", f"rank {rank} of {size}", "no memory"], call)
        group.copy_all = copy_all
        time.sleep(0.8)
        data = torch.ones(3)
        dist.all_reduce(data)
        assert data.eq(size).all()
    dist.destroy_process_group()


def gather_single():
    """PyTorch 2.15 passes it on to no backend in Python; gloo has none."""
    rank, size = _begin()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    output = torch.zeros(size, 3) if rank == 1 else torch.empty(0)
    options = dist.GatherOptions()
    options.rootRank = 1
    backend.gather_single(output, torch.full((3,), float(rank)), options).wait()
    if rank == 1:
        assert torch.equal(output, torch.arange(float(size))[:, None].expand(-1, 3))
    dist.destroy_process_group()


def splits_and_subgroups():
    rank, size = _begin()
    assert size == 4
    halves = dist.split_group(dist.group.WORLD, [[0, 1], [2, 3]])
    data = torch.tensor([float(rank)])
    dist.all_reduce(data, group=halves)
    assert data.item() == (1 if rank < 2 else 5)
    odd = dist.new_group([1, 3], backend="strata")
    if rank % 2:
        data = torch.tensor([float(rank)])
        dist.all_reduce(data, group=odd)
        assert data.item() == 4
        if rank == 1:
            dist.send(torch.ones(3), 3, group=odd)
        else:
            data = torch.zeros(3)
            dist.recv(data, 1, group=odd)
            assert data.eq(1).all()
    dist.barrier()
    dist.destroy_process_group(halves)
    dist.barrier()
    dist.destroy_process_group()


def split_without_some():
    rank, size = _begin()
    if rank < 2:
        pair = dist.split_group(dist.group.WORLD, [[0, 1]])
        data = torch.tensor([float(rank + 1)])
        dist.all_reduce(data, group=pair)
        assert data.item() == 3
    else:
        words = ["split_group", f"rank {rank} of {size}", "new_group"]
        _raises(RuntimeError, words, lambda: dist.split_group(dist.group.WORLD, [[0, 1]]))
    dist.barrier()
    dist.destroy_process_group()


def beside_others():
    dist.init_process_group("cpu:strata")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.ones(3)
    dist.all_reduce(data)
    assert data.eq(size).all()
    dist.destroy_process_group()


def again_after_destroy():
    for _ in range(3):
        rank, size = _begin()
        data = torch.ones(3)
        dist.all_reduce(data)
        dist.destroy_process_group()
    assert data.eq(size).all()


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def forked_loaders():
    rank, size = _begin()
    pending = dist.all_reduce(torch.ones(1 << 16), async_op=True)
    loader = torch.utils.data.DataLoader(_Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for _epoch in range(2):
        for batch in loader:
            dist.all_reduce(batch)
    pending.wait()
    dist.destroy_process_group()


def forked_child():
    """A child knows that the group is its parent's. It can have one of its own."""
    rank, size = _begin()
    # Threads of the pool, which the child has not.
    [dist.all_reduce(torch.ones(8), async_op=True).get_future().wait() for _ in range(3)]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    pending = dist.all_reduce(torch.ones(1 << 16), async_op=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            words = [f"rank {rank} of {size}", "forked"]
            options = dist.AllreduceOptions()
            for options.asyncOp in (False, True):
                _raises(RuntimeError, ["all_reduce", *words], lambda: backend.allreduce([torch.ones(3)], options))
            _raises(RuntimeError, ["send", *words], lambda: backend.send([torch.ones(3)], 0, 0))
            backend.shutdown(), backend.abort()
            own = backend.__class__(dist.HashStore(), 0, 1, timedelta(seconds=20), "own")
            data = torch.ones(3)
            options.asyncOp = True
            assert own.allreduce([data], options).get_future().wait()[0].eq(1).all()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pending.wait()
    dist.barrier()
    dist.destroy_process_group()


def queued_at_exit():
    """All ranks queue calls and end."""
    rank, size = _begin()
    for _ in range(20):
        dist.all_reduce(torch.ones(1 << 16), async_op=True).get_future().then(lambda done: done.value())


def queued_for_nobody():
    """Rank 0 queues what the others never call, and all end."""
    rank, size = _begin()
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        dist.irecv(torch.ones(4), 1)
    else:
        time.sleep(float(os.environ.get("TEST_PAUSE", "2")))


def monitored():
    rank, size = _begin()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    if rank == size - 1:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    elif rank == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    else:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    limit = timedelta(seconds=1.5)
    if rank in (1, 2):
        time.sleep(3)
        return
    begin = time.monotonic()
    words = ["monitored_barrier", "1, 2", f"rank {rank} of {size}"]
    _raises(RuntimeError, words, lambda: dist.monitored_barrier(timeout=limit, wait_all_ranks=True))
    assert time.monotonic() - begin < 4


def message_beside_a_new_group():
    """A message whose sender makes a group before it waits, and whose receiver makes it afterwards."""
    rank, size = _begin(timeout=timedelta(seconds=30))
    data = torch.full((4,), float(rank))
    if rank:
        work = dist.isend(data, 0)
        group = dist.new_group([0, 1])
        work.wait()
    else:
        dist.recv(data, 1)
        group = dist.new_group([0, 1])
    assert data.tolist() == [1.0] * 4
    dist.all_reduce(data, group=group)
    assert data.tolist() == [2.0] * 4
    dist.destroy_process_group()


def message_after_another_rank_has_left():
    """Two ranks exchange their first message when the third one has destroyed its group and is gone."""
    rank, size = _begin(timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 2:
        dist.destroy_process_group()
        return
    data = torch.full((4,), float(rank))
    if rank:
        time.sleep(2.5)
        dist.send(data, 0)
    else:
        dist.recv(data, 1)
        assert data.tolist() == [1.0] * 4


def calls_in_a_signal_handler():
    """A handler makes the same calls as what it interrupts. Where it waited for a lock of these, nothing would go on."""
    import signal

    rank, size = _begin(timeout=timedelta(seconds=30))
    peer, inside, works, sent = 1 - rank, [], [], [0, 0]

    def post(tag):
        sent[tag] += 1
        works.append(dist.isend(torch.ones(1), peer, tag=tag))
        works[-1].get_future()

    def handle(_signal, _frame):
        if not inside:
            inside.append(None)
            post(1)
            inside.pop()

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        post(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert min(sent) > 100, sent
    counts = [None] * size
    dist.all_gather_object(counts, sent)
    for tag in (0, 1):
        places = [torch.zeros(1) for _ in range(counts[peer][tag])]
        works += [dist.irecv(place, peer, tag=tag) for place in places]
    for work in works:
        work.wait()
    dist.destroy_process_group()


def new_memory_while_queued():
    """Tensors get other memory while calls on them are queued: these use what there was."""
    rank, size = _begin(timeout=timedelta(seconds=30))
    if rank == 1:
        time.sleep(0.5)
    works, tensors = [], []
    for turn in range(8):
        tensor = torch.ones(1 << 16)
        works.append(dist.all_reduce(tensor, async_op=True))
        if turn % 2:
            tensor.data = torch.zeros(3)
        else:
            tensor.set_(torch.zeros(3).untyped_storage(), 0, (3,))
        tensors.append(tensor)
    # What is freed would be given out again.
    others = [torch.full((1 << 16,), 7.0) for _ in range(16)]
    for work in works:
        work.wait()
    assert all(other.eq(7.0).all() for other in others)
    assert all(tensor.tolist() == [0.0] * 3 for tensor in tensors)
    dist.destroy_process_group()


def long_limits():
    """Limits that are longer than C's numbers, or shorter than a millisecond."""
    for limit in (timedelta(seconds=4294968), timedelta(days=365), timedelta(days=36500)):
        rank, size = _begin(timeout=limit)
        if rank:
            time.sleep(1)
        data = torch.ones(2)
        dist.all_reduce(data)
        work = dist.all_reduce(data, async_op=True)
        work.wait(limit)
        assert data.tolist() == [4.0, 4.0]
        _call_with_limit(limit)
        dist.destroy_process_group()


def _call_with_limit(limit):
    options = dist.BarrierOptions()
    options.timeout = limit
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu")) if type(group) is dist.ProcessGroup else group
    backend.barrier(options).wait()


def empty_messages():
    """A message of nothing is one, in its place among others."""
    rank, size = _begin(timeout=timedelta(seconds=30))
    empty, data = torch.zeros(0), torch.full((4,), 3.0)
    if rank:
        dist.send(empty, 0)
        dist.send(data, 0)
    else:
        place = torch.zeros(4)
        dist.recv(torch.zeros(0), 1)
        dist.recv(place, 1)
        assert torch.equal(place, data)
    dist.destroy_process_group()
