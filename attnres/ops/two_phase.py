"""The two-phase read with its own backward: sealed sources once per block, open sources as they come.

Pseudo-queries do not depend on the input, so all S reads of a block over the *sealed* sources are one pass
(`read_sealed`); each sublayer then merges the *open* sources (the running partial sum, or a group's outputs) by
online softmax and applies its norm (`merge`). Source: arXiv 2603.15031, Algorithm 1.

The backward (checked against autograd to fp64 rounding) never needs the phase-1 outputs. With the joint weights
p_j, logits s_j, r_j = 1/rms(v_j), the scaled query q = w * g and delta = <dh, h>:

    ds_j = p_j (<dh, v_j> - delta)
    dv_j = p_j dh + ds_j r_j q - ds_j s_j r_j^2 v_j / d
    dq   = sum_j ds_j r_j v_j

The two functions split this between them. `merge` hands back, for a phase-1 output o, (1 - p_open) dh, and for the
largest of its logits (`top`) the scalar -(1 - p_open) delta, which stands for what phase 2 knows of the softmax's own
-<do, o>. So the gradient of `top` is a private convention between the two, `total` takes none, and neither function is
used without the other.

Shapes: T tokens (leading axes flattened), n sources, S reads, d width. All arithmetic is in the compute dtype (at
least fp32), whatever the sources' dtypes are, also under autocast.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cpu, eager
from .eager import MergeSaved
from .norms import Norm, inverse_rms
from .reference import compute_dtype


class SealedReads(NamedTuple):
    """Phase 1 of S reads: what each of them holds before its open sources are known.

    Attributes:
        outputs: S tensors (T, d), each read's mixture of the sealed sources.
        top: S tensors (T,), the largest of its logits.
        total: S tensors (T,), the sum of exp(logit - top); no gradient.
        logits: (T, n, S), no gradient.
    """

    outputs: tuple[Tensor, ...]
    top: tuple[Tensor, ...]
    total: tuple[Tensor, ...]
    logits: Tensor


class Merged(NamedTuple):
    """A finished read. All but `x` carry no gradient and are there to be looked at.

    Attributes:
        x: (T, d), the read after its norm (or the read itself without one).
        h: (T, d), the read before its norm.
        sealed: (T,), the weight of the sealed sources together; each one's is this times their softmax.
        weights: (T, k), those of the open sources.
    """

    x: Tensor
    h: Tensor
    sealed: Tensor
    weights: Tensor


def _backend(tensors: Sequence[Tensor], compute: torch.dtype, *made: torch.dtype) -> ModuleType:
    """Which implementation of the four functions of eager.py takes these (T, d) tensors and makes these dtypes."""
    if not torch.compiler.is_compiling() and cpu.supports(tensors, compute, made):
        return cpu
    return eager


class _ReadSealed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, n: int, *rest: Tensor) -> tuple[Tensor, ...]:
        sources, inv_rms = rest[:n], rest[n:]
        queries = queries.to(inv_rms[0].dtype)
        backend = _backend(sources, queries.dtype)
        outputs, top, total, logits = backend.read_sealed(queries, sources, inv_rms)
        ctx.save_for_backward(queries, logits, *rest)
        ctx.n, ctx.backend = n, backend
        totals = total.unbind(0)
        ctx.mark_non_differentiable(logits, *totals)
        return (*outputs, *top.unbind(0), *totals, logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, logits, *rest = ctx.saved_tensors
        sources, inv_rms = rest[: ctx.n], rest[ctx.n :]
        reads = queries.shape[0]
        dqueries, dsources = ctx.backend.read_sealed_backward(
            queries, sources, inv_rms, logits, grads[:reads], grads[reads : 2 * reads]
        )
        return (dqueries, None, *dsources, *(None for _ in inv_rms))


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: int,
        dtype: torch.dtype,
        norm: Norm | None,
        weight: Tensor | None,
        bias: Tensor | None,
        query: Tensor | None,
        output: Tensor,
        top: Tensor | None,
        total: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        opens, inv_rms = rest[:k], rest[k:]
        if norm is not None:
            norm = norm._replace(weight=weight, bias=bias)
        if query is not None and top is not None:
            query = query.to(top.dtype)
        out_dtype = dtype if norm is None else norm.out_dtype or dtype
        backend = _backend((output, *opens), compute_dtype(output.dtype), dtype, out_dtype)
        x, saved = backend.merge(opens, inv_rms, query, output, top, total, norm, dtype)
        ctx.save_for_backward(weight, bias, query, *saved, *rest)
        ctx.k, ctx.norm, ctx.backend = k, norm and norm._replace(weight=None, bias=None), backend
        ctx.has_top = top is not None
        # What is only looked at; empty where it is an input, x itself or known beforehand.
        none = output.new_empty(0)
        h = saved.h if k and norm is not None else none
        sealed, weights = (saved.sealed, saved.weights) if k else (none.clone(), none.clone())
        ctx.mark_non_differentiable(h, sealed, weights)
        return x.clone() if x is output else x, h, sealed, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k = ctx.k
        weight, bias, query, *rest = ctx.saved_tensors
        count = len(MergeSaved._fields)
        saved, opens, inv_rms = MergeSaved(*rest[:count]), rest[count : count + k], rest[count + k :]
        norm = ctx.norm and ctx.norm._replace(weight=weight, bias=bias)
        d = ctx.backend.merge_backward(grads[0], opens, inv_rms, query, norm, saved)
        dtop = d.top if ctx.has_top else None
        return (None, None, None, d.weight, d.bias, d.query, d.output, dtop, None, *d.opens, *(None for _ in inv_rms))


def _flat(sources: Sequence[Tensor]) -> list[Tensor]:
    return [source.reshape(-1, source.shape[-1]) for source in sources]


def _flat_scalars(scalars: Sequence[Tensor]) -> list[Tensor]:
    return [scalar.reshape(-1) for scalar in scalars]


def read_sealed(sources: Sequence[Tensor], inv_rms: Sequence[Tensor], queries: Tensor) -> SealedReads:
    """Phase 1: S reads over n sealed sources in one pass.

    Args:
        sources: n tensors (..., d), of any floating dtypes.
        inv_rms: n tensors (...,), `inverse_rms` of each source, in the compute dtype.
        queries: (S, d), each pseudo-query times its key gain.
    """
    reads = queries.shape[0]
    with torch.autocast(sources[0].device.type, enabled=False):
        out = _ReadSealed.apply(queries, len(sources), *_flat(sources), *_flat_scalars(inv_rms))
    return SealedReads(out[:reads], out[reads : 2 * reads], out[2 * reads : 3 * reads], out[-1])


def merge(
    output: Tensor,
    top: Tensor,
    total: Tensor,
    opens: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    query: Tensor,
    norm: Norm | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Merged:
    """Phase 2: finish one read with its k open sources (k may be 0), then its norm.

        h = (1 - sum_j p_j) o + sum_j p_j v_j,    p = softmax over [top + log(total), s_1 .. s_k],    x = norm(h)

    Args:
        output, top, total: (T, d), (T,) and (T,), one read of `read_sealed`.
        opens: k tensors (..., d); inv_rms: k tensors (...,); query: (d,), pseudo-query times key gain.
        norm: the norm that consumes the read; None returns h as x.
        dtype: h is rounded to this (the stream's own dtype) and kept so for backward; None keeps the compute dtype.
    """
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    plain = None if norm is None else norm._replace(weight=None, bias=None)
    with torch.autocast(output.device.type, enabled=False):
        x, h, sealed, weights = _Merge.apply(
            len(opens),
            dtype or top.dtype,
            plain,
            weight,
            bias,
            query,
            output,
            top,
            total,
            *_flat(opens),
            *_flat_scalars(inv_rms),
        )
    if not opens:
        return Merged(x, output.detach(), torch.ones_like(top), top.new_empty(top.shape[0], 0))
    return Merged(x, x.detach() if norm is None else h, sealed, weights)


def apply_norm(h: Tensor, norm: Norm) -> Tensor:
    """norm(h) for h (..., d), with a backward of its own that saves h and one scalar a token.

    Every residual of this package uses it, the standard one included, so that comparisons compare residuals.
    """
    plain = norm._replace(weight=None, bias=None, out_dtype=norm.out_dtype or h.dtype)
    with torch.autocast(h.device.type, enabled=False):
        flat = h.reshape(-1, h.shape[-1])
        return _Merge.apply(0, h.dtype, plain, norm.weight, norm.bias, None, flat, None, None)[0].view(h.shape)


def depth_read(
    sources: Sequence[Tensor],
    query: Tensor,
    gain: Tensor | None = None,
    *,
    norm: Norm | None = None,
    eps: float = 1e-6,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One Attention Residuals read, for people with a model of their own.

        h = sum_i a_i v_i,    a = softmax_i( w . (g * v_i / sqrt(mean(v_i^2) + eps)) )

    Args:
        sources: n >= 1 tensors (..., d) of one shape: the embedding and earlier outputs or block sums. They are read
            where they lie: no stack of them is kept for backward.
        query: the pseudo-query w, (d,). Start it at zero: the read is then the plain mean.
        gain: the key norm's gain g, (d,), or None for ones.
        norm: apply this norm to h in the same pass (`attnres.Norm(weight, eps=...)`).
        eps: of the key norm.
        return_weights: also return the weights a, (n, ...), detached, in the compute dtype.

    Returns:
        h, or norm(h), of the sources' shape and the first source's dtype (`norm.out_dtype` if given); then the weights
        if asked for. Logits, softmax and statistics are in fp32 (fp64 for fp64 sources).

    Raises:
        ValueError: no source, or shapes that do not fit.

    Source: arXiv 2603.15031.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("depth_read got no sources: expected a list of at least one tensor (..., d)")
    shape = sources[0].shape
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"depth_read got source 0 of shape {tuple(shape)} and source {i} of {tuple(source.shape)}")
    for name, vector in (("query", query), ("gain", gain)):
        if vector is not None and vector.shape != shape[-1:]:
            raise ValueError(f"depth_read got {name} of shape {tuple(vector.shape)}: expected ({shape[-1]},)")
    if len(sources) == 1:  # the source itself, exactly, and exactly no gradient for its query
        weights = torch.ones((1, *shape[:-1]), dtype=compute_dtype(sources[0].dtype), device=sources[0].device)
        h = sources[0] + (query * 0.0 if gain is None else query * gain * 0.0).sum().to(sources[0].dtype)
        x = h if norm is None else apply_norm(h, norm)
        return (x, weights) if return_weights else x
    dtype = compute_dtype(sources[0].dtype)
    inv_rms = [inverse_rms(source, eps).to(dtype) for source in sources]
    scaled = query if gain is None else query * gain
    sealed = read_sealed(sources, inv_rms, scaled.unsqueeze(0))
    if norm is not None and norm.out_dtype is None:
        norm = norm._replace(out_dtype=sources[0].dtype)
    merged = merge(sealed.outputs[0], sealed.top[0], sealed.total[0], (), (), scaled, norm, dtype=sources[0].dtype)
    x = merged.x.view(shape)
    if not return_weights:
        return x
    weights = sealed.logits[:, :, 0].softmax(1)
    return x, weights.t().reshape(len(sources), *shape[:-1])
