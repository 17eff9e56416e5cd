"""The five functions of a backend as `torch.library` operators `attnres::*`, which torch.compile sees as one call each.

Autograd stays in two_phase.py, whose Functions call these while a graph is traced; they pick their backend when they
run. An operator returns tensors only, never one of its inputs, so what may be absent is an empty tensor here.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from attnres.ops.backend import MergeGradInputs, MergeGrads, MergeInputs, MergeSaved, ReadGradInputs, ReadInputs, Sealed
from attnres.ops.dispatch import KERNELS, backend_for
from attnres.ops.norms import Norm, norm_kind
from attnres.ops.precision import compute_dtype, is_read_rounded

BY_ADDRESS = False

_LIBRARY = torch.library.Library("attnres", "DEF")


def _operator(function: FunctionType) -> Callable[..., Any]:
    """Make the operator `attnres::NAME` of a function `_NAME`, whose annotations are its schema. What
    `torch.library.custom_op` adds, an autograd of its own and checks at every call, takes longer than a short read."""
    name = function.__name__.removeprefix("_")
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.attnres, name).default


def _or_none(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _filled(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def _apart(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return `results`, copying what shares memory with an input or another one: an operator may return neither."""
    places = {tensor.data_ptr() for tensor in arguments}
    out = []
    for tensor in results:
        shares = tensor.storage_offset() > 0 or tensor.data_ptr() in places
        tensor = tensor.clone(memory_format=torch.contiguous_format) if shares else tensor.contiguous()
        places.add(tensor.data_ptr())
        out.append(tensor)
    return out


@_operator
def _read_sealed(queries: Tensor, sources: Sequence[Tensor], eps: float, dtype: torch.dtype) -> list[Tensor]:
    backend = backend_for(sources, queries.dtype, dtype, reads=len(queries))
    outputs, *rest = backend.read_sealed(ReadInputs(queries, sources, eps, dtype))
    return _apart([*outputs, *rest], sources)


@torch.library.register_fake("attnres::read_sealed")
def _(queries: Tensor, sources: Sequence[Tensor], eps: float, dtype: torch.dtype) -> list[Tensor]:
    (tokens, d), n, reads, new = sources[0].shape, len(sources), queries.shape[0], queries.new_empty
    outputs = [new(tokens, d, dtype=dtype) for _ in range(reads)]
    return [*outputs, new(reads, tokens), new(reads, tokens), new(tokens, n, reads), new(tokens, n)]


def read_sealed(r: ReadInputs) -> Sealed:
    """As `eager.read_sealed`."""
    queries, sources, eps, dtype = r
    out = _read_sealed(queries, list(sources), eps, dtype)
    return Sealed(out[:-4], *out[-4:])


@_operator
def _read_sealed_backward(
    queries: Tensor,
    sources: Sequence[Tensor],
    inv_rms: Tensor,
    logits: Tensor,
    grads: Sequence[Tensor],
    dtop: Sequence[Tensor],
    carried: Sequence[Tensor],
) -> list[Tensor]:
    backend = backend_for(sources, queries.dtype, reads=len(queries))
    earlier = [_or_none(grad) for grad in carried]
    dqueries, dsources = backend.read_sealed_backward(
        ReadGradInputs(queries, sources, inv_rms, logits, grads, dtop, earlier)
    )
    return _apart([dqueries, *dsources], [*grads, *carried])


@torch.library.register_fake("attnres::read_sealed_backward")
def _(
    queries: Tensor,
    sources: Sequence[Tensor],
    inv_rms: Tensor,
    logits: Tensor,
    grads: Sequence[Tensor],
    dtop: Sequence[Tensor],
    carried: Sequence[Tensor],
) -> list[Tensor]:
    return [torch.empty_like(queries), *(source.new_empty(source.shape) for source in sources)]


def read_sealed_backward(r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]:
    """As `eager.read_sealed_backward`."""
    queries, sources, inv_rms, logits, grads, dtop, carried = r
    earlier = [_filled(grad, queries) for grad in carried]
    out = _read_sealed_backward(queries, list(sources), inv_rms, logits, list(grads), list(dtop), earlier)
    return out[0], out[1:]


def _norm(
    kind: int, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> Norm | None:
    return Norm(weight, bias, eps, kind == 2, out_dtype) if kind else None


@_operator
def _merge(
    opens: Sequence[Tensor],
    added: Tensor | None,
    query: Tensor | None,
    eps: float,
    output: Tensor | None,
    top: Tensor | None,
    total: Tensor | None,
    kind: int,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_eps: float,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
) -> list[Tensor]:
    vectors = [t for t in (output, added, *opens) if t is not None]
    norm = _norm(kind, weight, bias, norm_eps, out_dtype)
    backend = backend_for(vectors, compute_dtype(dtype), dtype, out_dtype, opens=len(opens))
    x, saved, partial = backend.merge(MergeInputs(opens, added, query, eps, output, top, total, norm, dtype))
    h = saved.h if opens else None  # without open sources it is the output itself
    saved = saved.named(len(opens), normed=norm is not None)
    return _apart([x, *(_filled(t, x) for t in (h, *saved[1:6], partial))], vectors)


@torch.library.register_fake("attnres::merge")
def _(
    opens: Sequence[Tensor],
    added: Tensor | None,
    query: Tensor | None,
    eps: float,
    output: Tensor | None,
    top: Tensor | None,
    total: Tensor | None,
    kind: int,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_eps: float,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
) -> list[Tensor]:
    first = opens[0] if opens else output
    assert first is not None
    (tokens, d), k, compute = first.shape, len(opens), compute_dtype(dtype)

    def new(present: object, *shape: int, dtype: torch.dtype = compute) -> Tensor:
        return first.new_empty(shape, dtype=dtype) if present else first.new_empty(0, dtype=torch.float32)

    return [
        new(True, tokens, d, dtype=out_dtype if kind else dtype),
        new(k, tokens, d, dtype=dtype if kind and is_read_rounded(first, dtype) else compute),
        new(kind, tokens),
        new(k, tokens, k),
        new(k and output is not None, tokens),
        new(k, tokens, k),
        new(k, tokens, k),
        new(added is not None, tokens, d, dtype=dtype),
    ]


def merge(m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]:
    """As `eager.merge`."""
    opens, added, query, eps, output, top, total, norm, dtype, _ = m
    weight, bias, norm_eps, _, out_dtype = norm or Norm()
    x, *saved, partial = _merge(
        list(opens),
        added,
        query,
        eps,
        output,
        top,
        total,
        norm_kind(norm),
        weight,
        bias,
        norm_eps,
        out_dtype or dtype,
        dtype,
    )
    k = len(opens)
    if not k:
        assert output is not None
        h = output.to(dtype) if norm and is_read_rounded(output, dtype) else output
        return x, MergeSaved(h, saved[1] if norm else None), None
    h, rstd, weights, sealed, scores, inv_rms = saved
    absent = (None if norm is None else rstd, weights, None if output is None else sealed, scores, inv_rms)
    return x, MergeSaved(h, *absent), None if added is None else partial


def _dtype_of_phase1(h: Tensor, grad: Tensor, kind: int) -> torch.dtype:
    """The dtype of phase-1 outputs, and so of their gradients (see `two_phase.read_sealed`)."""
    kernels = KERNELS.get(h.device.type)
    return compute_dtype(h.dtype) if kernels is not None and kernels.cached else h.dtype if kind else grad.dtype


@_operator
def _merge_backward(
    grad: Tensor,
    carried: Sequence[Tensor],
    opens: Sequence[Tensor],
    query: Tensor | None,
    kind: int,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_eps: float,
    h: Tensor,
    rstd: Tensor | None,
    weights: Tensor | None,
    sealed: Tensor | None,
    scores: Tensor | None,
    inv_rms: Tensor | None,
) -> list[Tensor]:
    saved = MergeSaved(h, rstd, weights, sealed, scores, inv_rms)
    norm = _norm(kind, weight, bias, norm_eps, None)
    backend = backend_for([h, grad, *opens], compute_dtype(h.dtype), opens=len(opens))
    d = backend.merge_backward(MergeGradInputs(grad, [_or_none(g) for g in carried], opens, query, norm, saved))
    output = None if d.output is None else d.output.to(_dtype_of_phase1(h, grad, kind))
    grads = [*(_filled(t, grad) for t in (output, d.top, d.query, d.weight, d.bias)), *d.opens]
    return _apart(grads, [grad, h, *carried])


@torch.library.register_fake("attnres::merge_backward")
def _(
    grad: Tensor,
    carried: Sequence[Tensor],
    opens: Sequence[Tensor],
    query: Tensor | None,
    kind: int,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_eps: float,
    h: Tensor,
    rstd: Tensor | None,
    weights: Tensor | None,
    sealed: Tensor | None,
    scores: Tensor | None,
    inv_rms: Tensor | None,
) -> list[Tensor]:
    (tokens, d), compute = h.shape, compute_dtype(h.dtype)

    def new(present: object, *shape: int, dtype: torch.dtype = compute) -> Tensor:
        return h.new_empty(shape, dtype=dtype) if present else h.new_empty(0, dtype=torch.float32)

    to_sealed = not opens or sealed is not None
    return [
        new(to_sealed, tokens, d, dtype=_dtype_of_phase1(h, grad, kind)),
        new(to_sealed, tokens),
        new(opens, d),
        new(weight is not None, d),
        new(bias is not None, d),
        *(source.new_empty(source.shape) for source in opens),
    ]


def merge_backward(m: MergeGradInputs) -> MergeGrads:
    """As `eager.merge_backward`."""
    grad, carried, opens, query, norm, saved, *_ = m
    assert saved.h is not None
    weight, bias, norm_eps, _, _ = norm or Norm()
    earlier = [_filled(g, grad) for g in carried]
    output, top, dquery, dweight, dbias, *dopens = _merge_backward(
        grad, earlier, list(opens), query, norm_kind(norm), weight, bias, norm_eps, saved.h, *saved[1:6]
    )
    none = _or_none
    return MergeGrads(none(output), none(top), dopens, none(dquery), none(dweight), none(dbias))


@_operator
def _mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    return backend_for(sources, weights.dtype, dtype).mix(sources, weights, dtype)


@torch.library.register_fake("attnres::mix")
def _(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    return sources[0].new_empty(sources[0].shape, dtype=dtype)


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `eager.mix`."""
    return _mix(list(sources), weights, dtype)
