"""The contract of a collective of one's own, found from what its `check` looks at.

`check` is a function, and a contract is a table: for each chunk of the output that `check` has read and accepted, the
table promises what that chunk holds.
"""

import contextlib
import sys

from strata.msccl.language.chunk import Chunk, ReduceChunk


class _Recorder(list):
    """A list that keeps which of its places are read."""

    def __init__(self, values):
        super().__init__(values)
        self.read = set()

    def __getitem__(self, index):
        places = range(len(self))[index]
        self.read.update(places if isinstance(index, slice) else (places,))
        return super().__getitem__(index)

    def _all(self):
        self.read.update(range(len(self)))
        return list(super().__iter__())

    def __iter__(self):
        return iter(self._all())

    def __reversed__(self):
        return reversed(self._all())

    def __contains__(self, value):
        return value in self._all()

    def __eq__(self, other):
        return self._all() == (other._all() if isinstance(other, _Recorder) else other)

    def __ne__(self, other):
        return not self == other

    __hash__ = None


@contextlib.contextmanager
def _recorded(prog):
    """`prog.buffers` with recorders in it; yields them by the identity of the lists that they stand for."""
    given, recorders = prog.buffers, {}
    for held in given:
        for values in held.values():
            if isinstance(values, list) and id(values) not in recorders:
                recorders[id(values)] = _Recorder(values)
    prog.buffers = [{name: recorders.get(id(values), values) for name, values in held.items()} for held in given]
    try:
        yield recorders
    finally:
        prog.buffers = given


class _Said:
    """Hands text on to standard error and keeps the first line."""

    def __init__(self):
        self._kept = ""

    def write(self, text):
        if "\n" not in self._kept:
            self._kept += text
        return sys.stderr.write(text)

    def flush(self):
        sys.stderr.flush()

    def first(self):
        return self._kept.partition("\n")[0]


def passes(prog):
    """What the collective's `check` returns, and the first line that it prints. What it prints goes to standard error, since
    the XML goes to standard output."""
    said = _Said()
    with contextlib.redirect_stdout(said):
        passed = prog.collective.check(prog)
    return passed, said.first()


def of(prog, origins):
    """What `check` returns with its first line, the rules of the contract, and how many chunks it reads that no rule can speak of.

    `origins`: the place in the inputs of each chunk that the collective put there.
    """
    with _recorded(prog) as recorders:
        passed = passes(prog)
    # A place that is read and found empty needs no promise.
    full = ((recorder, place) for recorder in recorders.values() for place in recorder.read)
    promised, left = {}, sum(list.__getitem__(recorder, place) is not None for recorder, place in full)
    results = prog.result_buffer()
    for rank, held in enumerate(prog.buffers):
        for index in range(prog.length(rank, results)):
            buffer, place = prog.collective.get_buffer_index(rank, results, index)
            recorder = recorders.get(id(held.get(buffer)))
            if recorder is not None and place in recorder.read:
                promise = _promise(list.__getitem__(recorder, place), prog.num_ranks, origins)
                if promise is not None:
                    promised[rank, index] = promise
                    left -= 1
    return passed, _rules(promised), left


def _promise(value, num_ranks, origins):
    """(rank, chunk) of an input; rank None for the reduction of all ranks' chunks; None for what no rule can say."""
    if isinstance(value, Chunk):
        return origins.get(value._key())
    if isinstance(value, ReduceChunk):
        places = [origins.get(chunk._key()) for chunk in value.chunks]
        if None not in places and sorted(rank for rank, _ in places) == list(range(num_ranks)):
            chunks = {chunk for _, chunk in places}
            return (None, chunks.pop()) if len(chunks) == 1 else None
    return None


def _rules(promised):
    """Rules for these promises: consecutive chunks of a rank in one, and consecutive ranks with the same."""
    runs = []  # [rank, first, last, source, chunk_shift]
    for (rank, index), (source, chunk) in sorted(promised.items(), key=lambda item: item[0]):
        run = runs[-1] if runs else None
        if run and run[0] == rank and run[2] == index - 1 and run[3:] == [source, chunk - index]:
            run[2] = index
        else:
            runs.append([rank, index, index, source, chunk - index])
    rules = []
    for first, last, source, chunks, shift, moves in _over_ranks(runs):
        rule = {"ranks": _range(first, last), "chunks": _range(*chunks)}
        if source is None:
            rule["reduced"] = True
        elif moves:
            rule["rank_shift"] = source - first
        else:
            rule["rank"] = source
        if shift:
            rule["chunk_shift"] = shift
        rules.append(rule)
    return rules


def _over_ranks(runs):
    """(first rank, last rank, source of the first, chunks, chunk_shift, whether the source moves with the rank)."""
    made = []
    for rank, first, last, source, shift in sorted(runs, key=lambda run: (run[1:3], run[4], run[0])):
        if made:
            begin, end, base, chunks, before, moves = made[-1]
            if end == rank - 1 and chunks == (first, last) and before == shift:
                if source == base and not (moves and begin < end):
                    made[-1] = (begin, rank, base, chunks, shift, False)
                    continue
                if None not in (source, base) and source - base == rank - begin and (moves or begin == end):
                    made[-1] = (begin, rank, base, chunks, shift, True)
                    continue
        made.append((rank, rank, source, (first, last), shift, False))
    return made


def _range(first, last):
    return str(first) if first == last else f"{first}-{last}"
