"""Every collective of torch.distributed as calls of the C interface.

A method checks its tensors, says which memory the C functions get, and hands the calls to `_run`, which makes them at once
or queues them. A tensor whose memory is not its elements in order is copied before and after. The names are those of
PyTorch's Backend; deprecated ones stand for the same methods.
"""

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from .. import _lib
from ._elements import Copies, message_of, moved, reduced

_c = _lib.lib


def grouped(calls, stream) -> int:
    """Makes several calls as one group."""
    code = _c.ncclGroupStart()
    if code:
        return code
    for call in calls:
        code = code or call(stream)
    return _c.ncclGroupEnd() or code


class Collectives:
    """The collectives. The subclass has `_comm`, `_run`, `_check` and `_refuse`."""

    def _one(self, call, tensors):
        if len(tensors) != 1:
            self._refuse(call, f"takes one tensor, not {len(tensors)}")
        return tensors[0]

    def _same(self, call, tensors, like, what):
        for tensor in tensors:
            if tensor.dtype != like.dtype or tensor.numel() != like.numel():
                self._refuse(
                    call,
                    f"{what} must have {like.numel()} elements of {like.dtype}; "
                    f"one has {tensor.numel()} of {tensor.dtype}",
                )

    def _root(self, call, root):
        if not 0 <= root < self.size():
            self._refuse(call, f"the root {root} is not a rank of this group")
        return root

    def _reduced(self, call, op, tensor):
        try:
            return reduced(op, tensor, self._comm)
        except TypeError as error:
            self._refuse(call, str(error), TypeError)

    # One tensor on each rank.

    def broadcast(self, tensors, opts=BroadcastOptions()):
        tensor = self._one("broadcast", tensors)
        self._check("broadcast", tensor)
        copies = Copies()
        data = copies.changed(tensor)
        datatype, count = moved(data)
        root, at, comm = self._root("broadcast", opts.rootRank), data.data_ptr(), self._comm

        def call(stream):
            return _c.ncclBroadcast(at, at, count, datatype, root, comm, stream)

        return self._run("broadcast", call, tensors, opts, copies, data)

    def _allreduce_call(self, name, tensor, op, copies):
        self._check(name, tensor)
        data = copies.changed(tensor)
        datatype, count, operation, own = self._reduced(name, op, data)
        at, comm = data.data_ptr(), self._comm

        def call(stream):
            code = _c.ncclAllReduce(at, at, count, datatype, operation, comm, stream)
            if own is not None:
                _c.ncclRedOpDestroy(own, comm)
            return code

        return call, data

    def allreduce(self, tensors, opts=AllreduceOptions()):
        copies = Copies()
        call, data = self._allreduce_call("all_reduce", self._one("all_reduce", tensors), opts.reduceOp, copies)
        return self._run("all_reduce", call, tensors, opts, copies, data)

    def allreduce_coalesced(self, tensors, opts=AllreduceCoalescedOptions()):
        copies, op = Copies(), opts.reduceOp
        parts = [self._allreduce_call("all_reduce_coalesced", tensor, op, copies) for tensor in tensors]
        return self._run_all("all_reduce_coalesced", parts, tensors, opts, copies)

    def allreduce_sparse(self, tensors, opts=AllreduceOptions()):
        self._refuse("all_reduce", "sparse tensors are not supported; use to_dense()", TypeError)

    def reduce(self, tensors, opts=ReduceOptions()):
        tensor = self._one("reduce", tensors)
        self._check("reduce", tensor)
        root, copies = self._root("reduce", opts.rootRank), Copies()
        data = copies.changed(tensor) if root == self.rank() else copies.read(tensor)
        datatype, count, operation, own = self._reduced("reduce", opts.reduceOp, data)
        at, comm = data.data_ptr(), self._comm

        def call(stream):
            code = _c.ncclReduce(at, at, count, datatype, operation, root, comm, stream)
            if own is not None:
                _c.ncclRedOpDestroy(own, comm)
            return code

        return self._run("reduce", call, tensors, opts, copies, data)

    # All-gather.

    def _allgather_call(self, name, output, tensor, copies):
        self._check(name, output, tensor)
        if output.dtype != tensor.dtype or output.numel() != tensor.numel() * self.size():
            self._refuse(
                name,
                f"the output must have {tensor.numel() * self.size()} elements of {tensor.dtype}, "
                f"not {output.numel()} of {output.dtype}",
            )
        source, target = copies.read(tensor), copies.written(output)
        datatype, count = moved(source)
        here, there, comm = source.data_ptr(), target.data_ptr(), self._comm

        def call(stream):
            return _c.ncclAllGather(here, there, count, datatype, comm, stream)

        return call, (source, target)

    def all_gather_single(self, output, tensor, opts=AllgatherOptions()):
        copies = Copies()
        call, held = self._allgather_call("all_gather_single", output, tensor, copies)
        return self._run("all_gather_single", call, [output], opts, copies, held)

    def all_gather_single_coalesced(self, outputs, inputs, opts=AllgatherOptions()):
        name, copies = "all_gather_single_coalesced", Copies()
        if len(outputs) != len(inputs):
            self._refuse(name, f"has {len(inputs)} inputs and {len(outputs)} outputs")
        parts = [self._allgather_call(name, output, tensor, copies) for output, tensor in zip(outputs, inputs)]
        return self._run_all(name, parts, outputs, opts, copies)

    def _allgather_list(self, name, outputs, tensor, copies):
        """The call for a list of outputs. Where their sizes differ, each rank broadcasts its own."""
        self._check(name, tensor, *outputs)
        if len(outputs) != self.size():
            self._refuse(name, f"needs {self.size()} outputs, one a rank, not {len(outputs)}")
        self._same(name, [outputs[self.rank()]], tensor, f"output {self.rank()}, like the input,")
        if any(output.dtype != tensor.dtype for output in outputs):
            self._refuse(name, f"all outputs must be {tensor.dtype}, like the input")
        source, comm = copies.read(tensor), self._comm
        here = source.data_ptr()
        if all(output.numel() == tensor.numel() for output in outputs):
            block = copies.joined(outputs, tensor, False, True)
            datatype, count = moved(source)
            there = block.data_ptr()
            return (lambda stream: _c.ncclAllGather(here, there, count, datatype, comm, stream)), (source, block)
        targets = [copies.written(output) for output in outputs]
        parts = [(target.data_ptr(), *moved(target)) for target in targets]

        def call(stream):
            return grouped(
                [
                    lambda stream, root=root, part=part: _c.ncclBroadcast(
                        here if root == self.rank() else part[0], part[0], part[2], part[1], root, comm, stream
                    )
                    for root, part in enumerate(parts)
                ],
                stream,
            )

        return call, (source, targets)

    def allgather(self, outputs, inputs, opts=AllgatherOptions()):
        copies = Copies()
        tensor, targets = self._one("all_gather", inputs), self._one("all_gather", outputs)
        call, held = self._allgather_list("all_gather", targets, tensor, copies)
        return self._run("all_gather", call, outputs, opts, copies, held)

    def allgather_coalesced(self, outputs, inputs, opts=AllgatherOptions()):
        name, copies = "all_gather_coalesced", Copies()
        if len(outputs) != self.size() or any(len(row) != len(inputs) for row in outputs):
            self._refuse(name, f"needs {self.size()} lists of {len(inputs)} outputs, one list a rank")
        columns = zip(*outputs)
        parts = [self._allgather_list(name, list(column), tensor, copies) for column, tensor in zip(columns, inputs)]
        return self._run_all(name, parts, outputs, opts, copies)

    # To and from one rank.

    def gather(self, outputs, inputs, opts=GatherOptions()):
        tensor = self._one("gather", inputs)
        root, copies, block = self._root("gather", opts.rootRank), Copies(), None
        self._check("gather", tensor)
        if root == self.rank():
            targets = self._one("gather", outputs)
            self._check("gather", *targets)
            if len(targets) != self.size():
                self._refuse("gather", f"needs {self.size()} outputs at the root, not {len(targets)}")
            self._same("gather", targets, tensor, "each output, like the input,")
            block = copies.joined(targets, tensor, False, True)
        elif outputs and outputs[0]:
            self._refuse("gather", f"only the root, rank {root}, has outputs")
        return self._gather_call("gather", tensor, block, root, outputs, opts, copies)

    def gather_single(self, output, tensor, opts=GatherOptions()):
        name, copies, block = "gather_single", Copies(), None
        root = self._root(name, opts.rootRank)
        self._check(name, tensor)
        if root == self.rank():
            self._check(name, output)
            if output.dtype != tensor.dtype or output.numel() != tensor.numel() * self.size():
                self._refuse(name, f"the output must have {tensor.numel() * self.size()} elements of {tensor.dtype}")
            block = copies.written(output)
        return self._gather_call(name, tensor, block, root, [output], opts, copies)

    def _gather_call(self, name, tensor, block, root, result, opts, copies):
        source, comm = copies.read(tensor), self._comm
        datatype, count = moved(source)
        here, there = source.data_ptr(), None if block is None else block.data_ptr()

        def call(stream):
            return _c.ncclGather(here, there, count, datatype, root, comm, stream)

        return self._run(name, call, result, opts, copies, (source, block))

    def scatter(self, outputs, inputs, opts=ScatterOptions()):
        output = self._one("scatter", outputs)
        root, copies, block = self._root("scatter", opts.rootRank), Copies(), None
        self._check("scatter", output)
        if root == self.rank():
            sources = self._one("scatter", inputs)
            self._check("scatter", *sources)
            if len(sources) != self.size():
                self._refuse("scatter", f"needs {self.size()} inputs at the root, not {len(sources)}")
            self._same("scatter", sources, output, "each input, like the output,")
            block = copies.joined(sources, output, True, False)
        elif inputs and inputs[0]:
            self._refuse("scatter", f"only the root, rank {root}, has inputs")
        target, comm = copies.written(output), self._comm
        datatype, count = moved(target)
        here, there = None if block is None else block.data_ptr(), target.data_ptr()

        def call(stream):
            return _c.ncclScatter(here, there, count, datatype, root, comm, stream)

        return self._run("scatter", call, outputs, opts, copies, (block, target))

    # Reduce-scatter.

    def _reduce_scatter_call(self, name, output, tensor, op, copies):
        self._check(name, output, tensor)
        if output.dtype != tensor.dtype or tensor.numel() != output.numel() * self.size():
            self._refuse(
                name,
                f"the input must have {output.numel() * self.size()} elements of {output.dtype}, "
                f"not {tensor.numel()} of {tensor.dtype}",
            )
        return self._reduce_scatter_memory(name, copies.written(output), copies.read(tensor), op)

    def _reduce_scatter_memory(self, name, target, source, op):
        datatype, count, operation, own = self._reduced(name, op, target)
        here, there, comm = source.data_ptr(), target.data_ptr(), self._comm

        def call(stream):
            code = _c.ncclReduceScatter(here, there, count, datatype, operation, comm, stream)
            if own is not None:
                _c.ncclRedOpDestroy(own, comm)
            return code

        return call, (source, target)

    def reduce_scatter_single(self, output, tensor, opts=ReduceScatterOptions()):
        copies = Copies()
        call, held = self._reduce_scatter_call("reduce_scatter_single", output, tensor, opts.reduceOp, copies)
        return self._run("reduce_scatter_single", call, [output], opts, copies, held)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=ReduceScatterOptions()):
        name, copies, op = "reduce_scatter_single_coalesced", Copies(), opts.reduceOp
        if len(outputs) != len(inputs):
            self._refuse(name, f"has {len(inputs)} inputs and {len(outputs)} outputs")
        parts = [self._reduce_scatter_call(name, output, tensor, op, copies) for output, tensor in zip(outputs, inputs)]
        return self._run_all(name, parts, outputs, opts, copies)

    def reduce_scatter(self, outputs, inputs, opts=ReduceScatterOptions()):
        """A list of inputs. Where their sizes differ, each rank gets a reduction of its own."""
        name, copies, op = "reduce_scatter", Copies(), opts.reduceOp
        output, sources = self._one(name, outputs), self._one(name, inputs)
        self._check(name, output, *sources)
        if len(sources) != self.size():
            self._refuse(name, f"needs {self.size()} inputs, one a rank, not {len(sources)}")
        self._same(name, [sources[self.rank()]], output, f"input {self.rank()}, like the output,")
        if any(source.dtype != output.dtype for source in sources):
            self._refuse(name, f"all inputs must be {output.dtype}, like the output")
        target = copies.written(output)
        if all(source.numel() == output.numel() for source in sources):
            block = copies.joined(sources, output, True, False)
            call, held = self._reduce_scatter_memory(name, target, block, op)
            return self._run(name, call, outputs, opts, copies, held)
        parts = []
        for root, source in enumerate(sources):
            plain = copies.read(source)
            parts.append((self._reduce_to(name, root, plain, target, op), plain))
        return self._run_all(name, parts, outputs, opts, copies, target)

    def _reduce_to(self, name, root, source, target, op):
        datatype, count, operation, own = self._reduced(name, op, source)
        here, there, comm = source.data_ptr(), target.data_ptr() if root == self.rank() else None, self._comm

        def call(stream):
            code = _c.ncclReduce(here, there, count, datatype, operation, root, comm, stream)
            if own is not None:
                _c.ncclRedOpDestroy(own, comm)
            return code

        return call

    # All-to-all.

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=AllToAllOptions()):
        name, copies = "all_to_all_single", Copies()
        self._check(name, output, tensor)
        if output.dtype != tensor.dtype:
            self._refuse(name, f"the input is {tensor.dtype} and the output {output.dtype}")
        source, target = copies.read(tensor), copies.written(output)
        if not output_splits and not input_splits:
            if source.numel() != target.numel():
                self._refuse(name, f"the input has {source.numel()} elements and the output {target.numel()}")
            if source.dim() == 0 or source.shape[0] % self.size():
                self._refuse(name, f"the first dimension of {tuple(source.shape)} cannot be split for {self.size()} ranks")
            datatype, count = moved(source)
            count //= self.size()
            here, there, comm = source.data_ptr(), target.data_ptr(), self._comm

            def call(stream):
                return _c.ncclAlltoAll(here, there, count, datatype, comm, stream)

            return self._run(name, call, [output], opts, copies, (source, target))
        sends = self._split(name, source, input_splits, "input")
        recvs = self._split(name, target, output_splits, "output")
        return self._exchange(name, sends, recvs, [output], opts, copies)

    def _split(self, name, tensor, sizes, what):
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if rows % self.size():
                self._refuse(name, f"the {what} has {rows} rows, which cannot be split for {self.size()} ranks")
            sizes = [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows or min(sizes) < 0:
            self._refuse(name, f"the {what} has {rows} rows; its split sizes are {list(sizes)} for {self.size()} ranks")
        return tensor.split(list(sizes))

    def alltoall(self, outputs, inputs, opts=AllToAllOptions()):
        name, copies = "all_to_all", Copies()
        self._check(name, *outputs, *inputs)
        if len(outputs) != self.size() or len(inputs) != self.size():
            self._refuse(
                name, f"needs {self.size()} inputs and outputs, one a rank, not {len(inputs)} and {len(outputs)}"
            )
        if any(tensor.dtype != inputs[0].dtype for tensor in (*inputs, *outputs)):
            self._refuse(name, f"all tensors must be {inputs[0].dtype}, like the first input")
        sends = [copies.read(tensor) for tensor in inputs]
        recvs = [copies.written(tensor) for tensor in outputs]
        return self._exchange(name, sends, recvs, outputs, opts, copies)

    def _exchange(self, name, sends, recvs, result, opts, copies):
        """One message to each rank and one from each, as one group."""
        me, comm = self.rank(), self._comm
        if sends[me].numel() != recvs[me].numel():
            self._refuse(name, f"rank {me} gives itself {sends[me].numel()} elements and expects {recvs[me].numel()}")
        calls = []
        for peer, (source, target) in enumerate(zip(sends, recvs)):
            for function, tensor in ((_c.ncclSend, source), (_c.ncclRecv, target)):
                data = message_of(tensor)
                datatype, count = moved(data)
                arguments = (data.data_ptr(), count, datatype, peer, comm)
                calls.append(lambda stream, function=function, arguments=arguments: function(*arguments, stream))
        return self._run(name, lambda stream: grouped(calls, stream), result, opts, copies, (sends, recvs))

    # No tensor.

    def barrier(self, opts=BarrierOptions()):
        self._check("barrier")
        data, comm = torch.zeros(1, dtype=torch.uint8), self._comm
        at = data.data_ptr()

        def call(stream):
            return _c.ncclAllReduce(at, at, 1, _lib.UINT8, _lib.SUM, comm, stream)

        return self._run("barrier", call, [], opts, Copies(), data)

    # The same methods under the names that PyTorch has given up.

    def _allgather_base(self, output, tensor, opts=AllgatherOptions()):
        return self.all_gather_single(output, tensor, opts)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=AllgatherOptions()):
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def gather_into_tensor(self, output, tensor, opts=GatherOptions()):
        return self.gather_single(output, tensor, opts)

    def _reduce_scatter_base(self, output, tensor, opts=ReduceScatterOptions()):
        return self.reduce_scatter_single(output, tensor, opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=ReduceScatterOptions()):
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def alltoall_base(self, output, tensor, output_splits, input_splits, opts=AllToAllOptions()):
        return self.all_to_all_single(output, tensor, output_splits, input_splits, opts)
