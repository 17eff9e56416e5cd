"""The sources of one forward pass without gradients, whose reads follow a fixed program.

A `Program` lists the rows of a bank that each read mixes and the row that each output goes to; it depends only on a
network's depth and layout. A `Bank` is the memory of one running pass, and `Banks` holds the idle ones: a pass takes
one out and puts it back, so that two passes, interleaved or in two threads, never share one.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.ops.backend import MergeInputs, ReadInputs, Sealed, in_two_phases
from attnres.ops.norms import Norm
from attnres.ops.precision import rounded_sum

KEPT = 32 << 20
"""Most bytes of all idle banks; the memory of a long prompt is freed."""

MOST = 16
"""Most idle banks of a network; prompts of different lengths need different ones."""


class Step(NamedTuple):
    """One read, and how the output before it enters the bank. Rows are numbers.

    Attributes:
        target, before: the row that the latest output goes into, and the row that it is added to, or None if the output
            itself becomes the row. Both are None for the first read.
        rows: the rows that the read mixes, in order.
        opens: how many of them, at the end, are not shared by all reads of the group.
        query: the row of the queries that scores them; None for one source, which has weight one.
        keeps: the row that stores the read before its norm, if that becomes a source; else None.
        scale: factor of the read.
        done: rows that no read after this one needs.
        finished: rows that change no more from this read on, and are stored as finished sources are.
    """

    target: int | None
    before: int | None
    rows: tuple[int, ...]
    opens: int
    query: int | None
    keeps: int | None
    scale: float
    done: tuple[int, ...]
    finished: tuple[int, ...] = ()


class Group(NamedTuple):
    """Reads `start` to `stop` - 1 share these finished rows; their queries start at `query`."""

    start: int
    stop: int
    rows: tuple[int, ...]
    query: int


class Program(NamedTuple):
    """A network's reads, the head's last, as steps over rows of a bank.

    Attributes:
        count: number of rows; row 0 is the embedding.
        sums: the rows that are memory of the bank. sealed: those of them that hold finished sums; None if finished
            sources are stored as the stream is.
        eps: eps of the key norm.
        alone: the most rows of a read that belongs to no group.
    """

    steps: tuple[Step, ...]
    groups: tuple[Group, ...]
    count: int
    sums: tuple[int, ...]
    eps: float
    alone: int = 1
    sealed: frozenset[int] | None = None

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
    """The sources of one forward pass, (T, d) a row, and its progress. A backend makes the reads, and writes nothing
    that only a backward needs.

    A row is an output itself, which is never written to, or memory of the bank that holds a sum. A sum is updated in
    place only if no later read needs its old value: sealed sources are never written to. Phase 1 of a group reuses the
    memory of the previous group's.

    Attributes:
        dtype: the dtype of the stream: of sums in progress, and of reads before their norm. stored: the dtype of
            finished sources and of phase 1's outputs.
        order: the value of `Banks.order_of` for its pass.
        embedding: the embedding of the pass, (..., d); reads have its shape.
        index: the number of the next read; of the last read, once its output may be written.
        was_read: whether read `index` was made.
        number: counts the passes that used this bank.
        norms: the caller's notes on the norm that it last set for each read.
        nbytes: bytes of the memory that stays allocated between passes.
    """

    embedding: Tensor
    nbytes = 0
    order: Any = None

    def __init__(
        self, program: Program, tokens: int, width: int, dtype: torch.dtype, stored: torch.dtype, backend: Any
    ) -> None:
        self.program, self.tokens, self.width, self.backend = program, tokens, width, backend
        self.dtype, self.stored = dtype, stored
        self.index, self.was_read, self.number = 0, False, 0
        self._groups = {group.start: group for group in program.shared(tokens, width, dtype, cached=self.cached)}
        self._in_group: dict[int, int] = {
            index: index - group.start for group in self._groups.values() for index in range(group.start, group.stop)
        }
        self._rows: Any = None  # of the running pass, by number
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
        """Return whether reads can use the vector itself; otherwise they use a copy."""
        return True

    def scale(self) -> float:
        """Return the factor by which the caller multiplies the next read if it has no fused norm (`set_norm`)."""
        return self.program.steps[self.index].scale

    def begin(self, embedding: Tensor, queries: Tensor) -> None:
        """Begin a pass with the embedding (..., d) and the scaled queries (reads, d) in fp32, both contiguous."""
        self.embedding, self.index, self.was_read, self._output = embedding, 0, False, None
        self._rows = [embedding, *(None for _ in range(self.program.count - 1))]
        self._queries = queries.unbind(0)
        self._all_queries = queries
        if embedding.shape != self._shape:
            with torch.inference_mode(False):  # inference tensors could not be written to in other passes
                self._take_memory(embedding)

    def _take_memory(self, embedding: Tensor) -> None:
        """Allocate the sums, and phase 1 of the largest group, in the shape of the embedding."""
        self._shape = embedding.shape
        rows = list(dict.fromkeys(step.target for step in self.program.steps if step.before is not None))
        sealed = [row for row in rows if row in (self.program.sealed or ())]
        rows = [*sealed, *(row for row in rows if row not in sealed)]
        counts = {start: group.stop - group.start for start, group in self._groups.items()}
        most = max(counts.values(), default=0)
        stored = embedding.new_empty(most + len(sealed), *self._shape, dtype=self.stored)
        stream = embedding.new_empty(len(rows) - len(sealed), *self._shape, dtype=self.dtype)
        top, total = embedding.new_empty(2, most, self.tokens, dtype=torch.float32)
        each, sums = stored[:most].unbind(0), (stored[most:], stream)
        # Separate tensors for reading and writing: a replayed call needs as many inputs as the planned one had.
        read, written = ([row for part in sums for row in part.unbind(0)] for _ in range(2))
        self._sums = dict(zip(rows, zip(read, written, strict=True), strict=True))
        self._phase1_of = {
            start: Sealed(list(each[:count]), top[:count], total[:count], None, None) for start, count in counts.items()
        }
        self.nbytes = stored.nbytes + stream.nbytes

    def set_norm(self, norm: Norm | None) -> None:
        """Set the norm fused with the next read, in this pass and later ones; its eps is divided by the square of the
        read's scale, which has the effect of scaling. With None the caller applies `scale`."""
        scale = self.program.steps[self.index].scale
        out_dtype = self.dtype if norm is None else norm.out_dtype or self.dtype
        self._set[self.index] = None if norm is None else norm._replace(eps=norm.eps / scale**2, out_dtype=out_dtype)

    def read(self) -> Tensor:
        """Return the next read after its norm, in the shape of the embedding."""
        index, added, rows = self.index, self._output, self._rows
        step, norm = self.program.steps[index], self._set[index]
        target: Any = step.target
        group = self._groups.get(index)
        opens = step.rows if index not in self._in_group else step.rows[len(step.rows) - step.opens :]
        row, memory = self._sums.get(target, (None, None))
        # The read itself adds the latest output to its sum, if that sum is the read's last source.
        alone = group is not None or step.query is None or step.target not in opens[-1:] or opens.count(step.target) > 1
        alone = alone or (memory is not None and memory.dtype != self.dtype)
        if added is not None and step.before is not None and alone:
            rounded_sum(rows[step.before], added, self.dtype, memory)
            rows[target], added = row, None
        if self.stored != self.dtype:
            for finished in step.finished:
                rows[finished] = rows[finished].to(self.stored)
        if group is not None:
            queries = self._all_queries[group.query : group.query + group.stop - group.start]
            sources = [rows[row] for row in group.rows]
            inputs = ReadInputs(queries, sources, self.program.eps, self.stored)
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
        if x is output:  # the next group's phase 1 overwrites this memory
            x = x.clone()
        if step.keeps is not None:
            h = x if norm is None else saved.h
            rows[step.keeps] = h.to(self.dtype, copy=h is output)
        for row in step.done:
            rows[row] = None
        self.was_read, self._output = True, None
        return x

    def write(self, output: Tensor) -> None:
        """Write the output (..., d) of the sublayer whose input was read last."""
        index = self.index = self.index + 1
        self.was_read, self._output = False, output
        step = self.program.steps[index]
        if step.before is None:
            assert step.target is not None
            self._rows[step.target] = output

    def end(self) -> None:
        """Release the pass's tensors, except the bank's memory."""
        self.number += 1
        self._rows = self._output = None
        del self.embedding


class Banks:
    """The idle banks of one network. Copies and pickles of this object are empty."""

    def __init__(self) -> None:
        self._waiting: list[Bank] = []
        self._lock = threading.Lock()

    @staticmethod
    def order_of(embedding: Tensor) -> Any:
        """Return a value that is equal for two passes if the second may reuse the first's memory as soon as it is
        launched: on CUDA their stream. Return None for a pass that a graph records, whose memory belongs to the
        graph."""
        if not embedding.is_cuda:
            return embedding.device
        if torch.cuda.is_current_stream_capturing():
            return None
        return embedding.device, torch.cuda.current_stream(embedding.device).cuda_stream

    def __reduce__(self) -> tuple[Any, ...]:
        return Banks, ()

    def take(self, kind: type[Bank], backend: Any, program: Program, embedding: Tensor, stored: torch.dtype) -> Bank:
        """Return an unused bank of this class for an embedding (..., d) of this shape, dtype and device, whose finished
        sources have the dtype `stored`."""
        width, order = embedding.shape[-1], self.order_of(embedding)
        sought = embedding.numel() // width, embedding.dtype, stored, backend, order
        with self._lock:
            for place, bank in enumerate(self._waiting):
                if (bank.tokens, bank.dtype, bank.stored, bank.backend, bank.order) == sought:
                    return self._waiting.pop(place)
        bank = kind(program, sought[0], width, embedding.dtype, stored, backend)
        bank.order = order
        return bank

    def put(self, bank: Bank) -> None:
        """Store a bank whose pass is over, and drop the oldest beyond `KEPT` bytes or `MOST` banks."""
        bank.end()
        if bank.order is None:
            return
        with self._lock:
            self._waiting.insert(0, bank)
            while len(self._waiting) > MOST or sum(one.nbytes for one in self._waiting) > KEPT:
                self._waiting.pop()
