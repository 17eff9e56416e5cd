"""The same five functions on C kernels, compiled on first use: several times faster than plain torch on a CPU.

Where `cpu_build` has no library (no compiler, or ATTNRES_CPU_KERNELS=0), `load()` is None and plain torch is used.
"""

import ctypes
import functools
import os
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops.cpu_build import SWITCH, library
from attnres.ops.eager import MergeGrads, MergeSaved, Sealed
from attnres.ops.norms import Norm
from attnres.ops.sharded import PLAIN

LANES = 16
"""Widths must be a multiple of this: one vector register of fp32."""

DTYPES = (torch.float32, torch.bfloat16)
"""Of the vectors that the kernels read and write."""

_BANK = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
"""Arguments of the bank's kernels: bank, step, address of an output, whether that is bf16."""


@functools.cache
def loaded() -> Any:
    """The library with the kernels' prototypes, or in a few words why there is none."""
    kernels = library()
    if not isinstance(kernels, str):
        for name in ("read_sealed", "read_sealed_backward", "merge", "merge_backward", "mix"):
            function = getattr(kernels, f"attnres_{name}")
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
        write, read = kernels.attnres_bank_write, kernels.attnres_bank_read
        write.argtypes, write.restype = _BANK, None
        read.argtypes, read.restype = [*_BANK, ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
    return kernels


def load() -> Any:
    """The compiled kernels, or None where they cannot be had. Never raises."""
    kernels = loaded()
    return None if isinstance(kernels, str) else kernels


def version() -> str | None:
    """Which build of the kernels this process has: the name of the library, a hash of what decides what is in it."""
    kernels = load()
    return None if kernels is None else Path(kernels._name).stem


@contextmanager
def switched(on: bool) -> Generator[None]:
    """Take the C kernels inside the block, or plain torch, whatever ATTNRES_CPU_KERNELS says."""
    before = os.environ.get(SWITCH)
    try:
        os.environ[SWITCH] = "1" if on else "0"
        _forget()
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
        _forget()


def _forget() -> None:
    library.cache_clear()
    loaded.cache_clear()


def why_not(tensors: Sequence[Tensor], compute: torch.dtype, outputs: Sequence[torch.dtype] = ()) -> str | None:
    """Why the kernels cannot take these (T, d) tensors or make vectors of these dtypes; None if they can."""
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
    if load() is None:
        kernels = loaded()
        return kernels if isinstance(kernels, str) else "there are no C kernels"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def address(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Return where a tensor of this shape has its numbers: what an address that goes to C is held against.

    Raises:
        UserError: it has another shape, or no numbers on this CPU (on another device or on meta, offloaded, freed,
            sharded, in flight).
    """
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # what torch.func wraps, sparse ones
        place = 0
    if tensor.shape != shape:
        raise UserError(f"a depth read got a tensor of shape {tuple(tensor.shape)}: expected {shape}")
    if not tensor.is_cpu or not (place or 0 in shape):
        raise UserError(
            f"a depth read got a {type(tensor).__name__} on {tensor.device} that has no numbers on this CPU: it is "
            "offloaded, sharded or on the meta device; load the residual whole, or let what offloads or shards it wrap "
            "the module `residual` itself"
        )
    return place


_Shaped = tuple[Tensor | None, tuple[int, ...]]


def _call(
    kernel: str,
    tokens: int,
    *counts: int,
    eps: tuple[float, ...] = (),
    rows: Sequence[_Shaped] = (),
    pointers: Sequence[_Shaped] = (),
    lists: Sequence[_Shaped] = (),
    last: Sequence[_Shaped] = (),
) -> None:
    """Fill a kernel's struct and call it: threads, counts, eps, `rows` of tensors, pointers to fp32, more `rows`, more
    pointers; each tensor with the shape that it must have.

    A `rows` is an address, the bytes from row to row, and whether it is bf16; zeros stand for None. Arguments that the
    kernels cannot read (another dtype, no unit stride along the width) are copied; results are never such.
    """
    words, alive = [], []
    for matrices, vectors in ((rows, pointers), (lists, last)):
        for tensor, shape in matrices:
            if tensor is None:
                words += (0, 0, 0)
                continue
            if tensor.dtype not in DTYPES:
                tensor = tensor.float()
            if tensor.shape != shape or not tensor.is_cpu:
                address(tensor, shape)
            if tensor.stride(-1) != 1:
                tensor = tensor.contiguous()
            place = tensor.data_ptr() or address(tensor, shape)
            words += (place, tensor.stride(0) * tensor.element_size(), tensor.dtype is torch.bfloat16)
            alive.append(tensor)
        for tensor, shape in vectors:
            if tensor is None:
                words.append(0)
                continue
            if tensor.shape != shape or not tensor.is_cpu:
                address(tensor, shape)
            if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                tensor = tensor.float().contiguous()
            words.append(tensor.data_ptr() or address(tensor, shape))
            alive.append(tensor)
    threads = threads_for(tokens) if tokens > 31 else 1
    call = struct.pack(f"{2 + len(counts)}q{len(eps)}d{len(words)}q", threads, tokens, *counts, *eps, *words)
    if getattr(loaded(), kernel)(call):
        raise MemoryError(f"{kernel} found no memory for its workspace")


_new = functools.partial(torch.empty, dtype=torch.float32, device=torch.device("cpu"))


def threads_for(tokens: int) -> int:
    """How many threads share `tokens`: one for every 16, at most torch's."""
    return max(1, min(torch.get_num_threads(), tokens // 16))


def read_sealed(queries: Tensor, sources: Sequence[Tensor], eps: float, dtype: torch.dtype) -> Sealed:
    """As `eager.read_sealed`."""
    (tokens, d), n, reads = sources[0].shape, len(sources), queries.shape[0]
    top, total = _new(reads, tokens), _new(reads, tokens)
    logits, inv_rms = _new(tokens, n, reads), _new(tokens, n)
    # Apart: what one read keeps must not keep the others alive.
    outputs = [_new(tokens, d, dtype=dtype) for _ in range(reads)]
    _call(
        "attnres_read_sealed",
        *(tokens, n, reads, d),
        eps=(eps,),
        pointers=(
            *((queries, (reads, d)), (logits, (tokens, n, reads)), (top, (reads, tokens)), (total, (reads, tokens))),
            (inv_rms, (tokens, n)),
        ),
        lists=[(vector, (tokens, d)) for vector in (*sources, *outputs)],
    )
    return Sealed(outputs, top, total, logits, inv_rms)


def read_sealed_backward(
    queries: Tensor,
    sources: Sequence[Tensor],
    inv_rms: Tensor,
    logits: Tensor,
    grads: Sequence[Tensor],
    dtop: Sequence[Tensor],
    carried: Sequence[Tensor | None],
) -> tuple[Tensor, list[Tensor]]:
    """As `eager.read_sealed_backward`."""
    (tokens, d), n, reads = sources[0].shape, len(sources), queries.shape[0]
    dsources = [_new(tokens, d, dtype=source.dtype) for source in sources]
    dqueries = _new(reads, d)
    _call(
        "attnres_read_sealed_backward",
        *(tokens, n, reads, d),
        pointers=(
            *((queries, (reads, d)), (inv_rms, (tokens, n)), (logits, (tokens, n, reads)), (dqueries, (reads, d))),
        ),
        lists=[(vector, (tokens, d)) for vector in (*sources, *grads, *carried, *dsources)],
        last=[(scalars, (tokens,)) for scalars in dtop],
    )
    return dqueries, dsources


def merge(
    opens: Sequence[Tensor],
    added: Tensor | None,
    query: Tensor | None,
    eps: float,
    output: Tensor | None,
    top: Tensor | None,
    total: Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
) -> tuple[Tensor, MergeSaved, Tensor | None]:
    """As `eager.merge`."""
    k = len(opens)
    if not k and norm is None:
        assert output is not None
        return output.to(dtype), MergeSaved(output), None
    tokens, d = (opens[0] if output is None else output).shape
    partial = before = None
    if added is not None:
        *earlier, before = opens
        partial = _new(tokens, d, dtype=dtype)
        opens = (*earlier, partial)
    weight = bias = rstd = weights = sealed = scores = inv_rms = None
    if norm is None:  # <dh, h> is then a true term of the gradient: h is kept unrounded
        h = written = _new(tokens, d)
        x = h if dtype is torch.float32 else _new(tokens, d, dtype=dtype)
    else:
        weight, bias, rstd = norm.weight, norm.bias, _new(tokens)
        keep = not k and output is not None and output.dtype is dtype
        h = output if keep else _new(tokens, d, dtype=dtype)
        written = None if keep else h
        x = _new(tokens, d, dtype=norm.out_dtype or torch.float32)
    assert h is not None
    if k:
        weights, scores, inv_rms = _new(tokens, k), _new(tokens, k), _new(tokens, k)
        sealed = None if output is None else _new(tokens)
    whole, each, one, width = (tokens, d), (tokens, k), (tokens,), (d,)
    _call(
        "attnres_merge",
        *(tokens, k, d, 0 if norm is None else 2 if norm.center else 1),
        eps=(eps, 0.0 if norm is None else norm.eps),
        rows=(
            *((before, whole), (added, whole), (output, whole), (written, whole), (None if x is h else x, whole)),
            *((weight, width), (bias, width)),
        ),
        pointers=(
            *((query, width), (top, one), (total, one), (rstd, one), (weights, each), (sealed, one), (scores, each)),
            (inv_rms, each),
        ),
        lists=tuple(zip(opens, (whole,) * k)),
    )
    return x, MergeSaved(h, rstd, weights, sealed, scores, inv_rms), partial


def merge_backward(
    grad: Tensor,
    carried: Sequence[Tensor | None],
    opens: Sequence[Tensor],
    query: Tensor | None,
    norm: Norm | None,
    saved: MergeSaved,
) -> MergeGrads:
    """As `eager.merge_backward`."""
    (tokens, d), k = saved.h.shape, len(opens)
    weight = None if norm is None else norm.weight
    alone = k > 0 and saved.sealed is None
    doutput, dtop = (None, None) if alone else (_new(tokens, d), _new(tokens))
    dopens = []
    for source in opens:
        dopens.append(_new(tokens, d, dtype=source.dtype))
    dquery = _new(d) if k else None
    dweight = None if weight is None else _new(d)
    dbias = None if norm is None or norm.bias is None else _new(d)
    h, rstd, weights, sealed, scores, inv_rms = saved
    whole, each, one, width = (tokens, d), (tokens, k), (tokens,), (d,)
    _call(
        "attnres_merge_backward",
        *(tokens, k, d, 0 if norm is None else 2 if norm.center else 1),
        eps=(0.0 if norm is None else norm.eps,),
        rows=((h, whole), (grad, whole), (doutput, whole), (weight, width)),
        pointers=(
            *(
                (query, width),
                (rstd, one),
                (weights, each),
                (sealed, one),
                (scores, each),
                (inv_rms, each),
                (dtop, one),
            ),
            *((dquery, width), (dweight, width), (dbias, width)),
        ),
        lists=tuple(zip((*opens, *carried[:k], *dopens), (whole,) * 3 * k)),
    )
    return MergeGrads(doutput, dtop, dopens, dquery, dweight, dbias)


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `eager.mix`."""
    (tokens, d), n = sources[0].shape, len(sources)
    h = _new(tokens, d, dtype=dtype)
    lists = [(vector, (tokens, d)) for vector in (h, *sources)]
    _call("attnres_mix", tokens, n, d, pointers=[(weights, (tokens, n))], lists=lists)
    return h
