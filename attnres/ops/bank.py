"""The sources of one forward pass without gradients, in memory that the next pass uses again: one C call a read.

A `Program` says in numbers which rows of a bank each read mixes and where each output goes; it depends on a network's
depth and layout alone. A `Bank` is the memory of one running pass, and `Banks` keeps those that no pass uses: a pass
takes one out and puts it back, so that two passes, in turn or in two threads, never share one.

A row is an output where it lies, which is never written to, or memory of the bank, in which sums are made. A sum is
made in place only where no later read needs what it was before: what is sealed is never written to.
"""

import ctypes
import struct
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.ops import cpu
from attnres.ops.dispatch import in_two_phases
from attnres.ops.norms import Norm, norm_kind

KEPT = 32 << 20
"""Bytes of all banks that wait for their next pass; the memory of a long prompt is given back."""

_HEAD = struct.Struct("3qd5q")
"""The kernels' `bank` before its table of rows."""
_THREADS, _QUERIES, _EMBEDDING = 2, 4, 9
"""Which of its words change from pass to pass."""
_ROW = 24
"""Bytes of one `rows`."""
_NORM = struct.Struct("qd6q")
"""The kernels' `step` up to the end of its norm: kind, eps, `rows` of weight and bias."""


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

    def packed(self, place: int | None) -> bytes:
        """The kernels' `step` after its norm: one pass over all rows, or over the open ones after phase 1, whose read
        `place` it is."""
        rows = self.rows if place is None else self.rows[len(self.rows) - self.opens :]
        alone = self.target not in rows[-1:] or rows.count(self.target) > 1
        numbers = (self.target, self.before, int(alone), place, self.keeps, self.query)
        return struct.pack(f"{7 + len(rows)}q", *(-1 if n is None else n for n in numbers), len(rows), *rows)


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
    """

    steps: tuple[Step, ...]
    groups: tuple[Group, ...]
    count: int
    sums: tuple[int, ...]
    eps: float

    def shared(self, tokens: int, width: int, dtype: torch.dtype) -> list[Group]:
        """The groups whose reads are made in two phases."""
        size = tokens * width * dtype.itemsize
        return [
            group
            for group in self.groups
            if in_two_phases(len(group.rows), group.stop - group.start, training=False, nbytes=size * len(group.rows))
        ]


class Bank:
    """One forward pass: its sources, (T, d) a row, and how far it is.

    Attributes:
        embedding: that of the pass, (..., d); reads have its shape.
        index: the number of the coming read; of the last one, once its output may be taken.
        was_read: whether that read was made.
        number: which of the passes that it served this is.
        norms: what the caller knows of the norm that it set last for each read.
        nbytes: of its memory.
    """

    embedding: Tensor

    def __init__(self, program: Program, tokens: int, width: int, dtype: torch.dtype) -> None:
        self.program, self.tokens, self.width, self.dtype = program, tokens, width, dtype
        self.index, self.was_read, self.number = 0, False, 0
        self._groups = {group.start: group for group in program.shared(tokens, width, dtype)}
        places: dict[int, int] = {
            index: index - group.start for group in self._groups.values() for index in range(group.start, group.stop)
        }
        self._steps = [
            ctypes.create_string_buffer(bytes(_NORM.size) + step.packed(places.get(index)))
            for index, step in enumerate(program.steps)
        ]
        self._addresses = [ctypes.addressof(step) for step in self._steps]
        reads = max((group.stop - group.start for group in self._groups.values()), default=0)
        sources = max((len(group.rows) for group in self._groups.values()), default=0)
        self.sums = cpu.new(len(program.sums), tokens, width, dtype=dtype)
        self._outputs = cpu.new(reads, tokens, width)
        self._tops, self._totals = cpu.new(reads, tokens), cpu.new(reads, tokens)
        self._scratch = cpu.new(tokens * sources * (reads + 1))
        self._zeros = cpu.new(width).zero_()
        self.nbytes = self.sums.nbytes + self._outputs.nbytes + self._scratch.nbytes
        self._phase1 = ctypes.create_string_buffer(b"".join(map(self._row, self._outputs)))
        vectors = self._zeros, self._tops, self._totals
        zeros, tops, totals = (vector.data_ptr() for vector in vectors)
        head = _HEAD.pack(tokens, width, 1, program.eps, 0, zeros, ctypes.addressof(self._phase1), tops, totals)
        table = [self._row(torch.empty(0, dtype=dtype))] * program.count
        for row, memory in zip(program.sums, self.sums, strict=True):
            table[row] = self._row(memory)
        self._memory = (ctypes.c_char * (len(head) + _ROW * len(table))).from_buffer_copy(b"".join((head, *table)))
        self._place, self._words = ctypes.addressof(self._memory), memoryview(self._memory).cast("B").cast("q")
        self._kernels: Any = cpu.load()
        self._alive: dict[int, Tensor] = {}
        self._output: Tensor | None = None
        self._dtypes: list[torch.dtype | None] = [None] * len(program.steps)
        self._vectors: list[tuple[Tensor | None, Tensor | None] | None] = [None] * len(program.steps)
        self.norms: list[Any] = [None] * len(program.steps)

    def scale(self) -> float:
        """What the coming read is multiplied by, where no norm follows that takes its eps."""
        return self.program.steps[self.index].scale

    def _row(self, tensor: Tensor) -> bytes:
        """The kernels' `rows` of a contiguous (..., d)."""
        return struct.pack("3q", tensor.data_ptr(), self.width * tensor.element_size(), tensor.dtype is torch.bfloat16)

    def begin(self, embedding: Tensor, queries: Tensor) -> None:
        """Begin a pass with the embedding (..., d) and the scaled queries (reads, d) in fp32, both contiguous."""
        self.embedding, self.index, self.was_read, self._output = embedding, 0, False, None
        self._alive = {0: embedding, -1: queries}
        words = self._words
        words[_QUERIES], words[_EMBEDDING] = queries.data_ptr(), embedding.data_ptr()
        if self.tokens > 1:
            words[_THREADS] = cpu.threads_for(self.tokens)

    def set_norm(self, norm: Norm | None) -> None:
        """Let the coming read, of this pass and of later ones, end with this norm; with None it is times its scale."""
        index = self.index
        weight, bias, eps, _, dtype = norm or Norm()
        vectors = self._vectors[index] = _readable(weight), _readable(bias)
        self._dtypes[index] = dtype
        kind, scale = norm_kind(norm), self.program.steps[index].scale
        rows = list[int]()
        for vector in vectors:
            rows += (0, 0, 0) if vector is None else (cpu.address(vector, (self.width,)), 0, _is_bf16(vector))
        _NORM.pack_into(self._steps[index], 0, kind, eps / scale**2, *rows)

    def read(self) -> Tensor:
        """Make the coming read and its norm, in the shape of the embedding."""
        index, output = self.index, self._output
        if index in self._groups and not self.was_read:
            self._share(self._groups[index])
            output = None
        x = torch.empty_like(self.embedding, dtype=self._dtypes[index])
        if self._kernels.attnres_bank_read(
            self._place, self._addresses[index], *_pointer(output), x.data_ptr(), x.dtype is torch.bfloat16
        ):
            raise MemoryError("attnres_bank_read found no memory for its workspace")
        self.was_read, self._output = True, None
        step = self.program.steps[index]
        for row in step.done:
            self._alive.pop(row, None)
        return x

    def _share(self, group: Group) -> None:
        """Make phase 1 of a group's reads, once the latest output has come into the bank."""
        self._kernels.attnres_bank_write(self._place, self._addresses[group.start], *_pointer(self._output))
        n, reads, floats = len(group.rows), group.stop - group.start, self.tokens * len(group.rows)
        queries = self._alive[-1].data_ptr() + 4 * self.width * group.query
        scratch = self._scratch.data_ptr()
        head = struct.pack(
            "5qd5q",
            *(cpu.threads_for(self.tokens), self.tokens, n, reads, self.width, self.program.eps, queries),
            *(scratch, self._tops.data_ptr(), self._totals.data_ptr(), scratch + 4 * floats * reads),
        )
        table = _HEAD.size
        rows = [bytes(self._memory[table + _ROW * row : table + _ROW * (row + 1)]) for row in group.rows]
        if self._kernels.attnres_read_sealed(b"".join((head, *rows, bytes(self._phase1[: _ROW * reads])))):
            raise MemoryError("attnres_read_sealed found no memory for its workspace")

    def write(self, output: Tensor) -> None:
        """Take the output (..., d) of the sublayer whose input was read last."""
        if not output.is_contiguous() or output.dtype not in cpu.DTYPES:
            output = _readable(output)
        index = self.index = self.index + 1
        self.was_read, self._output = False, output
        step = self.program.steps[index]
        if step.before is None:
            assert step.target is not None
            self._alive[step.target] = output

    def end(self) -> None:
        """Let go of the pass's tensors."""
        self.number += 1
        self._alive.clear()
        self._output = None
        del self.embedding


def _readable(tensor: Any) -> Any:
    """The tensor, or None, as the kernels read it: contiguous, in a dtype of theirs; a copy where it is not."""
    if tensor is None or (tensor.dtype in cpu.DTYPES and tensor.is_contiguous()):
        return tensor
    return (tensor if tensor.dtype in cpu.DTYPES else tensor.float()).contiguous()


def is_copied(vector: Tensor | None) -> bool:
    """Whether the kernels read a copy of it, which knows nothing of what is changed in place."""
    return _readable(vector) is not vector


def _pointer(tensor: Tensor | None) -> tuple[int, bool]:
    """Address, and whether it is bf16."""
    return (0, False) if tensor is None else (tensor.data_ptr(), _is_bf16(tensor))


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16


class Banks:
    """The banks of one network that wait for their next pass. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._waiting: list[Bank] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Banks, ()

    def take(self, program: Program, embedding: Tensor) -> Bank:
        """A bank for (..., d) like the embedding that nobody else has."""
        width, dtype = embedding.shape[-1], embedding.dtype
        tokens = embedding.numel() // width
        with self._lock:
            for place, bank in enumerate(self._waiting):
                if bank.tokens == tokens and bank.dtype is dtype:
                    return self._waiting.pop(place)
        return Bank(program, tokens, width, dtype)

    def put(self, bank: Bank) -> None:
        """Keep a bank whose pass is over for the next, and no more of them than `KEPT` bytes, the latest first."""
        bank.end()
        with self._lock:
            self._waiting.insert(0, bank)
            while self._waiting and sum(one.nbytes for one in self._waiting) > KEPT:
                self._waiting.pop()
