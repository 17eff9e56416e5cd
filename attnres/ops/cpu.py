"""A backend in C kernels, compiled on first use: several times faster than plain torch on a CPU.

Without a library from `cpu_build` (no compiler, or ATTNRES_CPU_KERNELS=0) `load()` is None and plain torch is used.
"""

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops.backend import (
    Backend,
    Call,
    Connect,
    ConnectGradInputs,
    Kernels,
    MergeGradInputs,
    MergeGrads,
    MergeInputs,
    MergeSaved,
    ReadGradInputs,
    ReadInputs,
    Sealed,
    scalar_rows,
)
from attnres.ops.bank import Bank, Group, Program, Step
from attnres.ops.cpu_build import SWITCH, library, turned_off
from attnres.ops.norms import Norm, norm_kind
from attnres.ops.sharded import PLAIN, settled

LANES = 16
"""Widths must be a multiple of this: one vector register of fp32."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of the vectors that the kernels read and write."""

_opened = dict[str, Any]()
"""The library, once opened: the backward of a graph made by its kernels uses it, whatever later reads use."""


def load() -> Any:
    """Return the compiled kernels, or None if they are not available. Never raises."""
    kernels = library()
    if isinstance(kernels, str):
        return None
    _opened["kernels"] = kernels
    return kernels


def version() -> str | None:
    """Return the name of the build of the kernels in this process, a hash of everything that determines the library."""
    kernels = load()
    return None if kernels is None else Path(kernels._name).stem


@contextmanager
def switched(on: bool) -> Generator[None]:
    """Use the C kernels inside the block, or plain torch, whatever ATTNRES_CPU_KERNELS says."""
    before = os.environ.get(SWITCH)
    try:
        os.environ[SWITCH] = "1" if on else "0"
        library.cache_clear()
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
        library.cache_clear()


def usable() -> Backend | str:
    """Return this module, or the reason why its kernels are not available."""
    if load() is not None:
        this: Any = sys.modules[__name__]
        return this
    kernels = library()
    return kernels if isinstance(kernels, str) else "there are no C kernels"


def why_not(call: Call) -> str | None:
    """Return the reason why the kernels cannot take a call, None if they can."""
    tensors, compute, outputs, *_ = call
    if compute is not torch.float32:
        return f"the C kernels compute in fp32, this call in {_name(compute)}"
    for dtype in outputs:
        if dtype not in DTYPES:
            return f"the C kernels make fp32 and bf16 vectors, not {_name(dtype)}"
    for t in tensors:
        if not t.is_cpu:
            return f"the C kernels read tensors on a CPU, not on {t.device.type}"
        if type(t) not in PLAIN:
            return f"the C kernels read plain tensors, not {type(t).__name__}"
        if t.dtype not in DTYPES:
            return f"the C kernels read fp32 and bf16 vectors, not {_name(t.dtype)}"
        if t.shape[-1] % LANES or not t.shape[-1]:
            return f"width {t.shape[-1]} is not a multiple of {LANES}"
    backend = usable()
    return backend if isinstance(backend, str) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_HIGH = 1 << 32
"""Offsets into a tensor without storage are below this; most addresses are above."""


def address(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Return the address of a tensor's values, after checking its shape and storage, for use in C.

    Raises:
        UserError: the tensor has another shape, or no values on this CPU (on another device or meta, offloaded, freed,
            sharded, or the result of a pending collective).
    """
    try:
        place, begin = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    except RuntimeError:  # tensors wrapped by torch.func, and sparse ones
        place = begin = 0
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        raise UserError(
            "several gradients at once were asked for (is_grads_batched=True), which the backward of depth reads does "
            "not have: run the forward pass inside `with attnres.ops.plain_torch():`"
        )
    if tensor.shape != shape:
        raise UserError(f"a depth read got a tensor of shape {tuple(tensor.shape)}: expected {tuple(shape)}")
    if not tensor.is_cpu or not (begin or 0 in shape):
        raise UserError(
            f"a depth read got a {type(tensor).__name__} on {tensor.device} that has no numbers on this CPU: it is "
            "offloaded, sharded or on the meta device; load the residual unsharded, or let the offloading or "
            "sharding code wrap the module `residual` itself"
        )
    return place


def _place(tensor: Tensor) -> int:
    """Return a tensor's address as `address` does, faster: the full check runs only for an address that could be an
    offset."""
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # `address` raises the error with a sentence
        place = 0
    return place if place >= _HIGH and tensor.is_cpu else address(tensor, tensor.shape)


def _call(
    kernel: str,
    tokens: int,
    counts: tuple[int, ...],
    shape: torch.Size,
    *,
    eps: tuple[float, ...] = (),
    rows: Sequence[Tensor | None] = (),
    vectors: Sequence[Tensor | None] = (),
    pointers: Sequence[Tensor | int | None] = (),
    lists: Sequence[Tensor | None] = (),
    last: Sequence[Tensor] = (),
) -> None:
    """Fill a kernel's struct and call it: threads, tokens, counts, eps, `rows` of tensors of this shape (..., d), those
    of vectors (d,), pointers to fp32 (tensors or addresses), more `rows`, more pointers.

    A `rows` entry is an address, the bytes from row to row, and whether the tensor is bf16; None becomes zeros.
    Arguments that the kernels cannot read (another dtype, no unit stride along the width) are copied; results always
    are readable.
    """
    words, alive, width = list[int](), list[Tensor](), shape[-1]
    nothing: tuple[Tensor, ...] = ()
    for matrices, expected, floats in (
        (rows, shape, nothing),
        (vectors, (width,), pointers),
        (lists, shape, last),
    ):
        for tensor in matrices:
            if tensor is None:
                words += (0, 0, 0)
                continue
            if type(tensor) is not Tensor:
                tensor = settled(tensor)
                alive.append(tensor)
            if tensor.shape != expected:
                address(tensor, expected)
            dtype = tensor.dtype
            if dtype is not torch.float32 and dtype is not torch.bfloat16:
                tensor, dtype = tensor.float(), torch.float32
                alive.append(tensor)
            stride = width
            if not tensor.is_contiguous():
                tensor = tensor.reshape(-1, width)
                tensor = tensor if tensor.stride(1) == 1 else tensor.contiguous()
                stride = tensor.stride(0)
                alive.append(tensor)
            place = _place(tensor)
            words += (place, 2 * stride, 1) if dtype is torch.bfloat16 else (place, 4 * stride, 0)
        for tensor in floats:
            if tensor is None or isinstance(tensor, int):
                words.append(tensor or 0)
                continue
            if type(tensor) is not Tensor:
                tensor = settled(tensor)
                alive.append(tensor)
            if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                tensor = tensor.float().contiguous()
                alive.append(tensor)
            words.append(_place(tensor))
    threads = threads_for(tokens) if tokens > 31 else 1
    call = struct.pack(f"{2 + len(counts)}q{len(eps)}d{len(words)}q", threads, tokens, *counts, *eps, *words)
    if getattr(_opened["kernels"], kernel)(call):
        raise MemoryError(f"{kernel} found no memory for its workspace")


new = functools.partial(torch.empty, dtype=torch.float32, device=torch.device("cpu"))
"""Allocates memory for the kernels: fp32 by default, whatever torch's default dtype and device are."""


def threads_for(tokens: int) -> int:
    """Return the number of threads for `tokens`: one for every 16, at most torch's number."""
    return max(1, min(torch.get_num_threads(), tokens // 16))


def read_sealed(r: ReadInputs) -> Sealed:
    """Compute phase 1 as `eager.read_sealed` does, in the sources' shape."""
    queries, sources, eps, dtype = r
    shape, n, (reads, d) = sources[0].shape, len(sources), queries.shape
    tokens = sources[0].numel() // d
    if d != shape[-1]:
        address(queries, (reads, shape[-1]))
    top, total = new(reads, tokens), new(reads, tokens)
    logits, inv_rms = new(tokens, n, reads), new(tokens, n)
    outputs = list[Tensor]()
    for _ in range(reads):  # separate tensors: one that a read keeps must not keep the others alive
        outputs.append(new(shape, dtype=dtype))
    _call(
        "attnres_read_sealed",
        tokens,
        (n, reads, d),
        shape,
        eps=(eps,),
        pointers=(queries, logits, top, total, inv_rms),
        lists=(*sources, *outputs),
    )
    return Sealed(outputs, top, total, logits, inv_rms)


def read_sealed_backward(r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of phase 1 as `eager.read_sealed_backward` does."""
    queries, sources, inv_rms, logits, grads, dtop, carried = r
    shape, n, (reads, d) = sources[0].shape, len(sources), queries.shape
    dsources = list[Tensor]()
    for source in sources:
        dsources.append(new(shape, dtype=source.dtype))
    dqueries = new(reads, d)
    _call(
        "attnres_read_sealed_backward",
        sources[0].numel() // d,
        (n, reads, d),
        shape,
        pointers=(queries, inv_rms, logits, dqueries),
        lists=(*sources, *grads, *carried, *dsources),
        last=dtop,
    )
    return dqueries, dsources


def merge(m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]:
    """Compute phase 2 and the norm as `eager.merge` does, in the sources' shape."""
    opens, added, query, eps, output, top, total, norm, dtype, _ = m
    k = len(opens)
    if not k and norm is None:
        assert output is not None
        return output.to(dtype), MergeSaved(output), None
    first = opens[0] if output is None else output
    shape, d = first.shape, first.shape[-1]
    tokens = first.numel() // d
    partial = before = None
    if added is not None:
        *earlier, before = opens
        partial = new(shape, dtype=dtype)
        opens = (*earlier, partial)
    weight = bias = None
    kind, norm_eps = norm_kind(norm), 0.0
    if norm is None:  # <dh, h> then is a true term of the gradient, so h is stored unrounded
        h = written = new(shape)
        x = h if dtype is torch.float32 else new(shape, dtype=dtype)
    else:
        weight, bias, norm_eps = norm.weight, norm.bias, norm.eps
        keep = not k and output is not None and output.dtype is dtype
        h = output if keep else new(shape, dtype=dtype)
        written = None if keep else h
        x = new(shape, dtype=norm.out_dtype or torch.float32)
    assert h is not None
    scalars = new(scalar_rows(k, sealed=output is not None), tokens)
    if query is not None and query.shape != (d,):
        address(query, (d,))
    _call(
        "attnres_merge",
        tokens,
        (k, d, kind),
        shape,
        eps=(eps, norm_eps),
        rows=(before, added, output, written, None if x is h else x),
        vectors=(weight, bias),
        pointers=(query, top, total, *_parts(scalars, k)),
        lists=opens,
    )
    return x, MergeSaved(h, scalars=scalars), partial


def _parts(scalars: Tensor | None, k: int) -> tuple[int, ...]:
    """Return the addresses of a merge's rstd, weights, sealed, scores and inv_rms (`MergeSaved`); 0 for an absent
    one."""
    if scalars is None:
        return 0, 0, 0, 0, 0
    rows, tokens = scalars.shape
    start, row = scalars.data_ptr(), 4 * tokens
    if not k:
        return start, 0, 0, 0, 0
    weights, each = start + row, row * k
    return start, weights, weights + 3 * each if rows > 1 + 3 * k else 0, weights + each, weights + 2 * each


def merge_backward(m: MergeGradInputs) -> MergeGrads:
    """Return the gradients of a merge as `eager.merge_backward` does."""
    grad, carried, opens, query, norm, saved, *_ = m
    h, scalars = saved
    assert h is not None
    shape, d, k = h.shape, h.shape[-1], len(opens)
    tokens = h.numel() // d
    weight = dweight = dbias = doutput = dtop = dquery = None
    kind, eps = norm_kind(norm), 0.0
    if norm is not None:
        weight, eps = norm.weight, norm.eps
        dweight = None if weight is None else new(d)
        dbias = None if norm.bias is None else new(d)
    if not k or (scalars is not None and len(scalars) == scalar_rows(k, sealed=True)):
        doutput, dtop = new(shape), new(tokens)
    dopens = list[Tensor]()
    for source in opens:
        dopens.append(new(shape, dtype=source.dtype))
    if k:
        dquery = new(d)
    _call(
        "attnres_merge_backward",
        tokens,
        (k, d, kind),
        shape,
        eps=(eps,),
        rows=(h, grad, doutput),
        vectors=(weight,),
        pointers=(query, *_parts(scalars, k), dtop, dquery, dweight, dbias),
        lists=(*opens, *carried[:k], *dopens),
    )
    return MergeGrads(doutput, dtop, dopens, dquery, dweight, dbias)


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the mixture as `eager.mix` does, in the sources' shape."""
    shape = sources[0].shape
    h, n, d = new(shape, dtype=dtype), len(sources), shape[-1]
    _call("attnres_mix", h.numel() // d, (n, d), shape, pointers=(weights,), lists=(h, *sources))
    return h


def connect(c: Connect) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return the streams after the write (None without a write, or if they are not read again), the read, and the
    coefficients and products of `ConnectGradInputs` (None without a table)."""
    streams, _, output, table, norm, form = c
    tokens, n = streams.shape[:-2], streams.shape[-2]
    new_streams = None if output is None or form.kind == "sum" else new(streams.shape, dtype=streams.dtype)
    x = new((*tokens, streams.shape[-1]), dtype=(norm and norm.out_dtype) or streams.dtype)
    coefficients = products = None
    if table is not None:
        coefficients = new(*tokens, form.count(n))
        products = new(x.numel() // x.shape[-1], form.groups(n), form.columns(n) + 1)
    _connected("attnres_connect", c, new_streams, x, coefficients, products)
    return new_streams, x, coefficients, products


def connect_backward(c: ConnectGradInputs) -> tuple[Tensor | None, ...]:
    """Return the gradients of streams, earlier coefficients, output, table and the norm's weight and bias."""
    streams, earlier, output, table, norm, _ = c.inputs
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    grads = (
        new(streams.shape, dtype=streams.dtype),
        None if earlier is None else new(earlier.shape).zero_() if output is None else new(earlier.shape),
        None if output is None else new(output.shape, dtype=output.dtype),
        None if table is None else new(table.shape),
        *(None if v is None else new(v.shape) for v in (weight, bias)),
    )
    _connected("attnres_connect_backward", c.inputs, c.made, c.dx, c.coefficients, c.products, c, grads)
    return grads


def _connected(
    kernel: str,
    c: Connect,
    made: Tensor | None,
    x: Tensor,
    coefficients: Tensor | None,
    products: Tensor | None,
    given: ConnectGradInputs | None = None,
    grads: tuple[Tensor | None, ...] = (None,) * 6,
) -> None:
    """Fill the struct of a parallel-streams kernel, which has one layout for both directions, and call it."""
    streams, earlier, output, table, norm, form = c
    weight, bias, eps, *_ = norm or Norm()
    dstreams, dearlier, doutput, *dparameters = grads
    dmade, dcoefficients = (None, None) if given is None else (given.dmade, given.dcoefficients)
    shape, n, alive = x.shape, streams.shape[-2], list[Tensor]()

    def placed(tensor: Tensor | None) -> tuple[int, ...]:
        """Return the address of streams, the bytes from token to token and from stream to stream, and whether they are
        bf16."""
        if tensor is None:
            return 0, 0, 0, 0
        if tensor.shape != streams.shape:
            address(tensor, streams.shape)
        tensor = settled(tensor)
        if tensor.dtype not in DTYPES:
            tensor = tensor.float()
        if not tensor.is_contiguous():
            tensor = tensor.reshape(-1, *tensor.shape[-2:])
            tensor = tensor if tensor.stride(2) == 1 else tensor.contiguous()
            strides = tensor.stride()[:2]
        else:
            strides = n * shape[-1], shape[-1]
        alive.append(tensor)
        return _place(tensor), *(tensor.element_size() * stride for stride in strides), _is_bf16(tensor)

    before = 0 if earlier is None else earlier.shape[-1]
    _call(
        kernel,
        x.numel() // shape[-1],
        (
            *(n, shape[-1], form.number, norm_kind(norm), form.late, form.steps, form.over_in, before),
            *(*placed(streams), *placed(made), *placed(dmade), *placed(dstreams)),
        ),
        shape,
        eps=(form.eps, form.read_eps, form.sinkhorn_eps, eps),
        rows=(output, x, doutput),
        vectors=(weight, bias),
        pointers=(earlier, table, coefficients, products, dcoefficients, dearlier, *dparameters),
    )


_HEAD = struct.Struct("3qd5q")
"""Layout of the kernels' `bank` up to its table of rows."""
_THREADS, _QUERIES, _EMBEDDING = 2, 4, 9
"""Indices of its words that change from pass to pass."""
_ROW = 24
"""Bytes of one `rows` entry."""
_NORM = struct.Struct("qd6q")
"""Layout of the kernels' `step` up to the end of its norm: kind, eps, `rows` of weight and bias."""


def _packed(step: Step, place: int | None) -> bytes:
    """Pack the kernels' `step` after its norm: one pass over all rows, or over the open ones after phase 1, in which
    this read has the index `place`."""
    rows = step.rows if place is None else step.rows[len(step.rows) - step.opens :]
    alone = step.target not in rows[-1:] or rows.count(step.target) > 1
    numbers = (step.target, step.before, int(alone), place, step.keeps, step.query)
    return struct.pack(f"{7 + len(rows)}q", *(-1 if n is None else n for n in numbers), len(rows), *rows)


class CpuBank(Bank):
    """A bank whose memory is reused by the next pass, with one C call a read.

    A row is an output itself, which is never written to, or memory of the bank that holds a sum. A sum is updated in
    place only if no later read needs its old value: sealed sources are never written to.
    """

    cached = True

    def __init__(
        self, program: Program, tokens: int, width: int, dtype: torch.dtype, stored: torch.dtype, backend: Any
    ) -> None:
        super().__init__(program, tokens, width, dtype, stored, backend)
        self._steps = [
            ctypes.create_string_buffer(bytes(_NORM.size) + _packed(step, self._in_group.get(index)))
            for index, step in enumerate(program.steps)
        ]
        self._addresses = [ctypes.addressof(step) for step in self._steps]
        reads = max((group.stop - group.start for group in self._groups.values()), default=0)
        sources = max((len(group.rows) for group in self._groups.values()), default=0)
        self.sums = new(len(program.sums), tokens, width, dtype=dtype)
        self._outputs = new(reads, tokens, width)
        self._tops, self._totals = new(reads, tokens), new(reads, tokens)
        self._scratch = new(tokens * sources * (reads + 1))
        self._zeros = new(width).zero_()
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
        self._kernels: Any = load()
        self._rows: dict[int, Tensor] = {}  # the tensors whose addresses the kernels have
        self._dtypes: list[torch.dtype | None] = [None] * len(program.steps)
        self._vectors: list[tuple[Tensor | None, Tensor | None] | None] = [None] * len(program.steps)

    def _row(self, tensor: Tensor) -> bytes:
        """Return the kernels' `rows` entry of a contiguous tensor (..., d)."""
        return struct.pack("3q", tensor.data_ptr(), self.width * tensor.element_size(), tensor.dtype is torch.bfloat16)

    def begin(self, embedding: Tensor, queries: Tensor) -> None:
        """Begin a pass with the embedding (..., d) and the scaled queries (reads, d) in fp32, both contiguous."""
        self.embedding, self.index, self.was_read, self._output = embedding, 0, False, None
        self._rows = {0: embedding, -1: queries}
        words = self._words
        words[_QUERIES], words[_EMBEDDING] = queries.data_ptr(), embedding.data_ptr()
        if self.tokens > 1:
            words[_THREADS] = threads_for(self.tokens)

    def set_norm(self, norm: Norm | None) -> None:
        """Set the norm fused with the next read, in this pass and later ones; with None the caller applies `scale`."""
        index = self.index
        weight, bias, eps, _, dtype = norm or Norm()
        vectors = self._vectors[index] = _readable(weight), _readable(bias)
        self._dtypes[index] = dtype
        kind, scale = norm_kind(norm), self.program.steps[index].scale
        rows = list[int]()
        for vector in vectors:
            rows += (0, 0, 0) if vector is None else (address(vector, (self.width,)), 0, _is_bf16(vector))
        _NORM.pack_into(self._steps[index], 0, kind, eps / scale**2, *rows)

    def read(self) -> Tensor:
        """Return the next read after its norm, in the shape of the embedding."""
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
            self._rows.pop(row, None)
        return x

    def _share(self, group: Group) -> None:
        """Compute phase 1 of a group's reads, once the latest output is in the bank."""
        self._kernels.attnres_bank_write(self._place, self._addresses[group.start], *_pointer(self._output))
        n, reads, floats = len(group.rows), group.stop - group.start, self.tokens * len(group.rows)
        queries = self._rows[-1].data_ptr() + 4 * self.width * group.query
        scratch = self._scratch.data_ptr()
        head = struct.pack(
            "5qd5q",
            *(threads_for(self.tokens), self.tokens, n, reads, self.width, self.program.eps, queries),
            *(scratch, self._tops.data_ptr(), self._totals.data_ptr(), scratch + 4 * floats * reads),
        )
        table = _HEAD.size
        rows = [bytes(self._memory[table + _ROW * row : table + _ROW * (row + 1)]) for row in group.rows]
        if self._kernels.attnres_read_sealed(b"".join((head, *rows, bytes(self._phase1[: _ROW * reads])))):
            raise MemoryError("attnres_read_sealed found no memory for its workspace")

    def write(self, output: Tensor) -> None:
        """Write the output (..., d) of the sublayer whose input was read last."""
        super().write(_readable(output))

    @staticmethod
    def takes(vector: Tensor) -> bool:
        return _readable(vector) is vector


def _readable(tensor: Any) -> Any:
    """Return the tensor, or None, in a form that the kernels read (contiguous, fp32 or bf16), copied if needed."""
    if tensor is None or (tensor.dtype in DTYPES and tensor.is_contiguous()):
        return tensor
    return (tensor if tensor.dtype in DTYPES else tensor.float()).contiguous()


def _pointer(tensor: Tensor | None) -> tuple[int, bool]:
    """Return the address of a tensor, and whether it is bf16."""
    return (0, False) if tensor is None else (tensor.data_ptr(), _is_bf16(tensor))


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16


def has_bf16(_: torch.device) -> bool:
    """Return whether the CPU multiplies in bf16 natively."""
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16") or features.get("arm_bf16"))


KERNELS = Kernels(
    device="cpu",
    name="cpu",
    title="the C kernels",
    found="a CPU with a C compiler",
    load=usable,
    why_not=why_not,
    turned_off=turned_off,
    cached=True,
    few_compiled={1: 1 << 17, 2: 1 << 17},
    bank=CpuBank,
    host=True,
    devices=lambda: [torch.device("cpu")],
    bf16=has_bf16,
    # Plain torch computes fp16 here, where the gradient of a weight is a small difference of products with the read:
    # rounding the read would double to quadruple the error that rounding the gradient makes.
    unrounded=frozenset({torch.float16}),
    whole_scores=512,  # faster in bf16 and not slower in fp32: benchmarks/results/attention_cpu.json
    version=version,
    switched=switched,
)
