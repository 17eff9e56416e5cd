"""The sources of one forward pass without gradients, whose reads are made by a fixed program.

A `Program` says in numbers which rows of a bank each read mixes and where each output goes; it depends on a network's
depth and layout alone. A `Bank` is the memory of one running pass, and `Banks` keeps those that no pass uses: a pass
takes one out and puts it back, so that two passes, in turn or in two threads, never share one.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.ops.backend import MergeInputs, ReadInputs, Sealed, in_two_phases
from attnres.ops.norms import Norm
from attnres.ops.precision import rounded_sum

KEPT = 32 << 20
"""Bytes of all banks that wait for their next pass; the memory of a long prompt is given back."""

MOST = 16
"""Banks of a network that wait: lengths of prompts differ."""


class Step(NamedTuple):
    """One read, and how the output before it comes into the bank. Rows are numbers.

    Attributes:
        target, before: the row that the latest output goes into, and the row that it is added to; None where the output
            itself is the row. The first read has neither.
        rows: what the read mixes, in order.
        opens: how many of them, at the end, the reads of its group have not in common.
        query: the row of the queries that scores them; None for one source, which has weight one.
        keeps: the row that takes the read before its norm, where that goes on as a source.
        scale: of the read.
        done: rows that no read needs any more once this one is made.
    """

    target: int | None
    before: int | None
    rows: tuple[int, ...]
    opens: int
    query: int | None
    keeps: int | None
    scale: float
    done: tuple[int, ...]


class Group(NamedTuple):
    """Reads `start` to `stop` - 1 have these finished rows in common, and queries from `query` on."""

    start: int
    stop: int
    rows: tuple[int, ...]
    query: int


class Program(NamedTuple):
    """A network's reads, the head's last, in rows of a bank.

    Attributes:
        count: how many rows there are; row 0 is the embedding.
        sums: those that are memory of the bank.
        eps: of the key norm.
        alone: the most rows of a read that is in no group.
    """

    steps: tuple[Step, ...]
    groups: tuple[Group, ...]
    count: int
    sums: tuple[int, ...]
    eps: float
    alone: int = 1

    def shared(self, tokens: int, width: int, dtype: torch.dtype, *, cached: bool) -> list[Group]:
        """Return the groups whose reads are made in two phases. cached: small sources stay in a cache between reads."""
        size, shared = tokens * width * dtype.itemsize, list[Group]()
        for group in self.groups:
            count, reads = len(group.rows), group.stop - group.start
            opens = max(step.opens for step in self.steps[group.start : group.stop])
            nbytes = size * count if cached else None
            if in_two_phases(count, reads, training=False, opens=opens, nbytes=nbytes):
                shared.append(group)
        return shared


class Bank:
    """One forward pass: its sources, (T, d) a row, and how far it is. A backend makes its reads, and writes nothing
    that only a backward needs.

    A row is an output where it lies, which is never written to, or memory of the bank, in which sums are made. A sum is
    made in place only where no later read needs what it was before: what is sealed is never written to. Phase 1 of a
    group writes where that of the group before it did.

    Attributes:
        order: what `Banks.order_of` says of its pass.
        embedding: that of the pass, (..., d); reads have its shape.
        index: the number of the coming read; of the last one, once its output may be taken.
        was_read: whether that read was made.
        number: which of the passes that it served this is.
        norms: what the caller knows of the norm that it set last for each read.
        nbytes: of the memory that it keeps between passes.
    """

    embedding: Tensor
    nbytes = 0
    order: Any = None

    def __init__(self, program: Program, tokens: int, width: int, dtype: torch.dtype, backend: Any) -> None:
        self.program, self.tokens, self.width, self.dtype, self.backend = program, tokens, width, dtype, backend
        self.index, self.was_read, self.number = 0, False, 0
        self._groups = {group.start: group for group in program.shared(tokens, width, dtype, cached=self.cached)}
        self._in_group: dict[int, int] = {
            index: index - group.start for group in self._groups.values() for index in range(group.start, group.stop)
        }
        self._rows: list[Any] = []
        self._shape: Any = None
        self._sums: dict[Any, tuple[Any, Any]] = {}
        self._phase1_of: dict[int, Sealed] = {}
        self._output: Tensor | None = None
        self._set: list[Norm | None] = [None] * len(program.steps)
        self.norms: list[Any] = [None] * len(program.steps)

    cached = False
    """Whether sources stay in a core's cache from one read to the next (`in_two_phases`)."""

    @staticmethod
    def takes(vector: Tensor) -> bool:
        """Return whether reads are made of the vector where it lies; else of a copy."""
        return True

    def scale(self) -> float:
        """Return what the coming read is multiplied by, where no norm follows that takes its eps."""
        return self.program.steps[self.index].scale

    def begin(self, embedding: Tensor, queries: Tensor) -> None:
        """Begin a pass with the embedding (..., d) and the scaled queries (reads, d) in fp32, both contiguous."""
        self.embedding, self.index, self.was_read, self._output = embedding, 0, False, None
        self._rows = [embedding, *(None for _ in range(self.program.count - 1))]
        self._queries = queries.unbind(0)
        self._all_queries = queries
        if embedding.shape != self._shape:
            with torch.inference_mode(False):  # memory of inference could not be written to in any other pass
                self._take_memory(embedding)

    def _take_memory(self, embedding: Tensor) -> None:
        """Take memory for the sums, and for phase 1 of the largest group, in the shape of the embedding."""
        self._shape = embedding.shape
        rows = list(dict.fromkeys(step.target for step in self.program.steps if step.before is not None))
        counts = {start: group.stop - group.start for start, group in self._groups.items()}
        most = max(counts.values(), default=0)
        memory = embedding.new_empty(len(rows) + most, *self._shape, dtype=self.dtype)
        top, total = embedding.new_empty(2, most, self.tokens, dtype=torch.float32)
        outputs, sums = memory.split((most, len(rows)))
        # One tensor to read and one to write: a call is replayed where its inputs are as many tensors.
        self._sums = dict(zip(rows, zip(sums.unbind(0), sums.unbind(0), strict=True), strict=True))
        each = outputs.unbind(0)
        self._phase1_of = {
            start: Sealed(list(each[:count]), top[:count], total[:count], None, None) for start, count in counts.items()
        }
        self.nbytes = memory.nbytes

    def set_norm(self, norm: Norm | None) -> None:
        """Let the coming read, of this pass and of later ones, end with this norm; with None it is times its scale."""
        scale = self.program.steps[self.index].scale
        out_dtype = self.dtype if norm is None else norm.out_dtype or self.dtype
        self._set[self.index] = None if norm is None else norm._replace(eps=norm.eps / scale**2, out_dtype=out_dtype)

    def read(self) -> Tensor:
        """Make the coming read and its norm, in the shape of the embedding."""
        index, added, rows = self.index, self._output, self._rows
        step, norm = self.program.steps[index], self._set[index]
        target: Any = step.target
        group = self._groups.get(index)
        opens = step.rows if index not in self._in_group else step.rows[len(step.rows) - step.opens :]
        # The latest output joins its sum in the read's own pass, if that has the sum as its last source.
        alone = group is not None or step.query is None or step.target not in opens[-1:] or opens.count(step.target) > 1
        row, memory = self._sums.get(target, (None, None))
        if added is not None and step.before is not None and alone:
            rounded_sum(rows[step.before], added, self.dtype, memory)
            rows[target], added = row, None
        if group is not None:
            queries = self._all_queries[group.query : group.query + group.stop - group.start]
            sources = [rows[row] for row in group.rows]
            inputs = ReadInputs(queries, sources, self.program.eps, self.dtype)
            outputs, top, total, *_ = self.backend.read_sealed(inputs, self._phase1_of[index])
            self._read_parts = list(zip(outputs, top.unbind(0), total.unbind(0), strict=True))
        sources = [rows[row] for row in opens]
        if added is not None and step.before is not None:
            sources[-1] = rows[step.before]
        else:
            added = None
        output = top = total = query = None
        if index in self._in_group:
            output, top, total = self._read_parts[self._in_group[index]]
        if step.query is None:
            (output,), sources = sources, []
        elif sources:
            query = self._queries[step.query]
        x, saved, partial = self.backend.merge(
            MergeInputs(
                sources,
                added,
                query,
                self.program.eps,
                output,
                top,
                total,
                norm,
                self.dtype,
                "nothing" if step.keeps is None else "h alone",
            ),
            None if added is None else memory,
        )
        if partial is not None:
            rows[target] = row if partial is memory else partial
        if x is output:  # where the next group's phase 1 writes
            x = x.clone()
        if step.keeps is not None:
            h = x if norm is None else saved.h
            rows[step.keeps] = h.to(self.dtype, copy=h is output)
        for row in step.done:
            rows[row] = None
        self.was_read, self._output = True, None
        return x

    def write(self, output: Tensor) -> None:
        """Take the output (..., d) of the sublayer whose input was read last."""
        index = self.index = self.index + 1
        self.was_read, self._output = False, output
        step = self.program.steps[index]
        if step.before is None:
            assert step.target is not None
            self._rows[step.target] = output

    def end(self) -> None:
        """Let go of the pass's tensors, but for the bank's memory."""
        self.number += 1
        self._rows, self._output = [], None
        del self.embedding


class Banks:
    """The banks of one network that wait for their next pass. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._waiting: list[Bank] = []
        self._lock = threading.Lock()

    @staticmethod
    def order_of(embedding: Tensor) -> Any:
        """Return what a pass shares with one that may write over its memory as soon as it is launched: on CUDA the
        stream. None of a pass that a graph records, whose memory is the graph's alone."""
        if not embedding.is_cuda:
            return embedding.device
        if torch.cuda.is_current_stream_capturing():
            return None
        return embedding.device, torch.cuda.current_stream(embedding.device).cuda_stream

    def __reduce__(self) -> tuple[Any, ...]:
        return Banks, ()

    def take(self, kind: type[Bank], backend: Any, program: Program, embedding: Tensor) -> Bank:
        """Return a bank of this class for (..., d) like the embedding, one that nobody else has."""
        width, dtype, order = embedding.shape[-1], embedding.dtype, self.order_of(embedding)
        tokens = embedding.numel() // width
        with self._lock:
            for place, bank in enumerate(self._waiting):
                if bank.tokens == tokens and bank.dtype is dtype and bank.backend is backend and bank.order == order:
                    return self._waiting.pop(place)
        bank = kind(program, tokens, width, dtype, backend)
        bank.order = order
        return bank

    def put(self, bank: Bank) -> None:
        """Keep a bank whose pass is over for the next, the latest first; of all at most `KEPT` bytes and `MOST`."""
        bank.end()
        if bank.order is None:
            return
        with self._lock:
            self._waiting.insert(0, bank)
            while len(self._waiting) > MOST or sum(one.nbytes for one in self._waiting) > KEPT:
                self._waiting.pop()
