"""The same five functions on C kernels, compiled on first use: several times faster than plain torch on a CPU.

Where `cpu_build` has no library (no compiler, or ATTNRES_CPU_KERNELS=0), `load()` is None and plain torch is used.
"""

import ctypes
import functools
import os
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops.cpu_build import SWITCH, library
from attnres.ops.eager import MergeGrads, MergeSaved, Sealed
from attnres.ops.norms import Norm

LANES = 16
"""Widths must be a multiple of this: one vector register of fp32."""

_DTYPES = (torch.float32, torch.bfloat16)

_PLAIN = (Tensor, nn.Parameter)
"""Types whose numbers lie where they say; other ones (sharded, in flight, fake) know better what is to be done."""

_PROTOTYPES = {
    "attnres_read_sealed": "qqqq ppf ppppp i",
    "attnres_read_sealed_backward": "qqqq ppppp pppp i",
    "attnres_merge": "qqq ppppf ppp ifpp pp ppppp i",
    "attnres_merge_backward": "qqq ppp pppp ifppp pppp ppp i",
    "attnres_mix": "qqq ppp i",
}
"""Arguments of each kernel: q int64, p pointer, f float, i int."""

_TYPES = {"q": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float, "i": ctypes.c_int}


@functools.cache
def _loaded() -> Any:
    """The library with the kernels' prototypes, or in a few words why there is none."""
    kernels = library()
    if not isinstance(kernels, str):
        for name, codes in _PROTOTYPES.items():
            function = getattr(kernels, name)
            function.argtypes, function.restype = [_TYPES[code] for code in codes.replace(" ", "")], ctypes.c_int
    return kernels


def load() -> Any:
    """The compiled kernels, or None where they cannot be had. Never raises."""
    loaded = _loaded()
    return None if isinstance(loaded, str) else loaded


def version() -> str | None:
    """Which build of the kernels this process has: the name of the library, a hash of what decides what is in it."""
    loaded = load()
    return None if loaded is None else Path(loaded._name).stem


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
    _loaded.cache_clear()


def why_not(tensors: Sequence[Tensor], compute: torch.dtype, outputs: Sequence[torch.dtype] = ()) -> str | None:
    """Why the kernels cannot take these (T, d) tensors or make vectors of these dtypes; None if they can."""
    if compute is not torch.float32:
        return f"the C kernels compute in fp32, this call in {_name(compute)}"
    for dtype in outputs:
        if dtype not in _DTYPES:
            return f"the C kernels make fp32 and bf16 vectors, not {_name(dtype)}"
    for t in tensors:
        if not t.is_cpu:
            return f"the C kernels read tensors on a CPU, not on {t.device.type}"
        if type(t) not in _PLAIN:
            return f"the C kernels read plain tensors, not {type(t).__name__}"
        if t.dtype not in _DTYPES:
            return f"the C kernels read fp32 and bf16 vectors, not {_name(t.dtype)}"
        if t.shape[-1] % LANES or not t.shape[-1]:
            return f"width {t.shape[-1]} is not a multiple of {LANES}"
    if load() is None:
        loaded = _loaded()
        return loaded if isinstance(loaded, str) else "there are no C kernels"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _vectors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """With unit stride along the width, in a dtype that the kernels read; copies only what is not so."""
    readable = [t if t.dtype in _DTYPES else t.float() for t in tensors]
    return [t if t.stride(1) == 1 else t.contiguous() for t in readable]


def address(tensor: Tensor, *shape: int) -> int:
    """Return where a tensor of this shape has its numbers: the one place from which addresses go to C.

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


def _rows(shape: tuple[int, int], *tensors: Tensor | None) -> array:
    """The kernels' `rows` of each matrix: address, bytes from row to row, whether bf16; zeros for None."""
    words = []
    for t in tensors:
        if t is None:
            words += (0, 0, 0)
        elif t.dtype is torch.bfloat16:
            words += (address(t, *shape), 2 * t.stride(0), 1)
        else:
            words += (address(t, *shape), 4 * t.stride(0), 0)
    return array("q", words)


def _at(rows: array, index: int = 0) -> int:
    """Address of the `rows` of one matrix."""
    return rows.buffer_info()[0] + 3 * rows.itemsize * index


def _float(tensor: Tensor) -> Tensor:
    if tensor.dtype is not torch.float32:
        tensor = tensor.float()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _float(tensor)


def _pointer(tensor: Tensor | None, *shape: int) -> int | None:
    return None if tensor is None else address(tensor, *shape)


def _threads(tokens: int) -> int:
    return max(1, min(torch.get_num_threads(), tokens // 16))


def _call(kernel: str, *arguments: Any) -> None:
    if getattr(load(), kernel)(*arguments):
        raise MemoryError(f"{kernel} found no memory for its workspace")


_new = functools.partial(torch.empty, dtype=torch.float32, device=torch.device("cpu"))


def read_sealed(queries: Tensor, sources: Sequence[Tensor], eps: float, dtype: torch.dtype) -> Sealed:
    """As `eager.read_sealed`."""
    (tokens, d), n, reads = sources[0].shape, len(sources), queries.shape[0]
    top, total = _new(reads, tokens), _new(reads, tokens)
    logits, inv_rms = _new(tokens, n, reads), _new(tokens, n)
    # Apart: what one read keeps must not keep the others alive.
    outputs = [_new(tokens, d, dtype=dtype) for _ in range(reads)]
    queries, sources = _float(queries), _vectors(sources)
    source_rows, output_rows = _rows((tokens, d), *sources), _rows((tokens, d), *outputs)
    _call(
        "attnres_read_sealed",
        *(tokens, n, reads, d, _at(source_rows), address(queries, reads, d), eps),
        *(logits.data_ptr(), top.data_ptr(), total.data_ptr(), inv_rms.data_ptr(), _at(output_rows)),
        _threads(tokens),
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
    queries, inv_rms, logits, dtop = _float(queries), _float(inv_rms), _float(logits), [_float(x) for x in dtop]
    sources, grads = _vectors(sources), _vectors(grads)
    earlier = [None if c is None else _vectors([c])[0] for c in carried]
    dsources = [_new(tokens, d, dtype=source.dtype) for source in sources]
    dqueries = _new(reads, d)
    source_rows, grad_rows, carried_rows, dsource_rows = (
        _rows((tokens, d), *vectors) for vectors in (sources, grads, earlier, dsources)
    )
    tops = array("q", [address(x, tokens) for x in dtop])
    _call(
        "attnres_read_sealed_backward",
        *(tokens, n, reads, d, _at(source_rows), address(inv_rms, tokens, n), address(queries, reads, d)),
        address(logits, tokens, n, reads),
        *(_at(grad_rows), _at(tops), _at(carried_rows), _at(dsource_rows), dqueries.data_ptr()),
        _threads(tokens),
    )
    return dqueries, dsources


def _kind(norm: Norm | None) -> int:
    return 0 if norm is None else 2 if norm.center else 1


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
    opens, vectors = _vectors(opens), _vectors([t for t in (output, added) if t is not None])
    partial = before = None
    if added is not None:
        added, before, partial = vectors.pop(), opens[-1], _new(tokens, d, dtype=dtype)
        opens[-1] = partial
    output = vectors[0] if vectors else None
    top, total, query = _optional(top), _optional(total), _optional(query)
    weight = bias = rstd = weights = sealed = scores = inv_rms = None
    if norm is None:  # <dh, h> is then a true term of the gradient: h is kept unrounded
        h = written = _new(tokens, d)
        x = h if dtype is torch.float32 else _new(tokens, d, dtype=dtype)
    else:
        weight, bias, rstd = _optional(norm.weight), _optional(norm.bias), _new(tokens)
        keep = not k and output is not None and output.dtype is dtype
        h = output if keep else _new(tokens, d, dtype=dtype)
        written = None if keep else h
        x = _new(tokens, d, dtype=norm.out_dtype or torch.float32)
    assert h is not None
    if k:
        weights, scores, inv_rms = _new(tokens, k), _new(tokens, k), _new(tokens, k)
        sealed = None if output is None else _new(tokens)
    open_rows = _rows((tokens, d), *opens)
    others = _rows((tokens, d), before, added, output, written, None if x is h else x)
    _call(
        "attnres_merge",
        *(tokens, k, d, _at(open_rows), _at(others), _at(others, 1), _pointer(query, d), eps),
        *(_at(others, 2), _pointer(top, tokens), _pointer(total, tokens)),
        *(_kind(norm), 0.0 if norm is None else norm.eps, _pointer(weight, d), _pointer(bias, d)),
        *(_at(others, 3), _at(others, 4), _pointer(rstd, tokens), _pointer(weights, tokens, k)),
        *(_pointer(sealed, tokens), _pointer(scores, tokens, k), _pointer(inv_rms, tokens, k)),
        _threads(tokens),
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
    grad, h, *opens = _vectors([grad, saved.h, *opens])
    earlier = [None if c is None else _vectors([c])[0] for c in carried]
    query, weights, sealed, scores, inv_rms, rstd = map(
        _optional, (query, saved.weights, saved.sealed, saved.scores, saved.inv_rms, saved.rstd)
    )
    weight = None if norm is None else _optional(norm.weight)
    alone = k > 0 and sealed is None
    doutput, dtop = (None, None) if alone else (_new(tokens, d), _new(tokens))
    dopens = [_new(tokens, d, dtype=source.dtype) for source in opens]
    dquery = _new(d) if k else None
    dweight = None if weight is None else _new(d)
    dbias = None if norm is None or norm.bias is None else _new(d)
    open_rows, carried_rows, dopen_rows = (_rows((tokens, d), *vectors) for vectors in (opens, earlier, dopens))
    others = _rows((tokens, d), h, grad, doutput)
    _call(
        "attnres_merge_backward",
        *(tokens, k, d, _at(open_rows), _at(carried_rows), _pointer(query, d)),
        *(_pointer(weights, tokens, k), _pointer(sealed, tokens)),
        *(_pointer(scores, tokens, k), _pointer(inv_rms, tokens, k)),
        *(_kind(norm), 0.0 if norm is None else norm.eps, _pointer(weight, d), _at(others), _pointer(rstd, tokens)),
        *(_at(others, 1), _at(others, 2), _pointer(dtop, tokens), _at(dopen_rows)),
        *(_pointer(dquery, d), _pointer(dweight, d), _pointer(dbias, d)),
        _threads(tokens),
    )
    return MergeGrads(doutput, dtop, dopens, dquery, dweight, dbias)


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `eager.mix`."""
    (tokens, d), n = sources[0].shape, len(sources)
    h, sources, weights = _new(tokens, d, dtype=dtype), _vectors(sources), _float(weights)
    source_rows, out_rows = _rows((tokens, d), *sources), _rows((tokens, d), h)
    places = _at(source_rows), address(weights, tokens, n), _at(out_rows)
    _call("attnres_mix", tokens, n, d, *places, _threads(tokens))
    return h
