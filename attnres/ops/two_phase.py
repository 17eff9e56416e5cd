"""The two-phase read with its own backward: sealed sources once per block, open sources as they come.

Pseudo-queries do not depend on the input, so all S reads of a block over the *sealed* sources are one pass
(`read_sealed`); each sublayer then merges the *open* sources (the running partial sum, or a group's outputs) by
online softmax and applies its norm (`merge`). Source: arXiv 2603.15031, Algorithm 1.

The backward (checked against autograd to fp64 rounding) never needs the phase-1 outputs. With the joint weights
p_j, logits s_j, r_j = 1/rms(v_j), the scaled query q = w * g and delta = <dh, h>:

    ds_j = p_j (<dh, v_j> - delta)
    dv_j = p_j dh + ds_j r_j q - ds_j s_j r_j^2 v_j / d
    dq   = sum_j ds_j r_j v_j

The two functions split this between them. `merge` hands back, for a phase-1 output o, (1 - p_open) dh, and for its
log-sum-exp the scalar -(1 - p_open) delta, which is that of `lse` *and* the softmax's own -<do, o> in one: so the
gradient of `lse` here is a private convention between the two, and neither is used without the other.

Shapes: T tokens (leading axes flattened), n sources, S reads, d width. All arithmetic is in the compute dtype (at
least fp32), whatever the sources' dtypes are, also under autocast.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .norms import Norm, inverse_rms, normalise, normalise_backward
from .reference import compute_dtype


class SealedReads(NamedTuple):
    """Phase 1 of S reads: what each of them holds before its open sources are known.

    Attributes:
        outputs: S tensors (T, d), each read's mixture of the sealed sources.
        lse: S tensors (T,), log-sum-exp of its logits.
        logits: (T, n, S), no gradient; the weights are exp(logits - joint log-sum-exp).
    """

    outputs: tuple[Tensor, ...]
    lse: tuple[Tensor, ...]
    logits: Tensor


class Merged(NamedTuple):
    """A finished read. `h`, `lse` and `open_logits` carry no gradient and are there to be looked at.

    Attributes:
        x: (T, d), the read after its norm (or the read itself without one).
        h: (T, d), the read before its norm.
        lse: (T,), joint log-sum-exp over sealed and open sources.
        open_logits: (T, k).
    """

    x: Tensor
    h: Tensor
    lse: Tensor
    open_logits: Tensor


def _token_major(sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(T, n, d) in the compute dtype: transient, so that one matrix product serves all sources of a token."""
    first = sources[0]
    if all(source.dtype == dtype for source in sources):
        return torch.stack(tuple(sources), 1)
    values = first.new_empty((first.shape[0], len(sources), first.shape[1]), dtype=dtype)
    for i, source in enumerate(sources):
        values[:, i].copy_(source)
    return values


def _source_gradient(weighted: Tensor, along_query: Tensor, along_value: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """p dh (given as `weighted`, overwritten) + (ds r) q - (ds s r^2 / d) v, for one source of shape (T, d)."""
    weighted.addr_(along_query, query)
    return weighted.addcmul_(along_value.unsqueeze(-1), value, value=-1.0)


class _ReadSealed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, n: int, *rest: Tensor) -> tuple[Tensor, ...]:
        sources, inv_rms = rest[:n], rest[n:]
        dtype = inv_rms[0].dtype
        queries = queries.to(dtype)
        values = _token_major(sources, dtype)
        r = torch.stack(inv_rms, 1)
        logits = (values @ queries.t()).mul_(r.unsqueeze(-1))
        lse = logits.logsumexp(1)
        outputs = torch.bmm((logits - lse.unsqueeze(1)).exp_().transpose(1, 2), values)
        ctx.save_for_backward(queries, logits, lse, *sources, *inv_rms)
        ctx.n = n
        ctx.mark_non_differentiable(logits)
        return (*outputs.unbind(1), *lse.unbind(1), logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.n
        queries, logits, lse, *rest = ctx.saved_tensors
        sources, inv_rms = rest[:n], rest[n:]
        reads, d = queries.shape
        values = _token_major(sources, logits.dtype)
        r = torch.stack(inv_rms, 1)
        p = (logits - lse.unsqueeze(1)).exp_()
        dh = torch.stack(grads[:reads], 1)
        ds = torch.bmm(values, dh.transpose(1, 2)).add_(torch.stack(grads[reads : 2 * reads], 1).unsqueeze(1)).mul_(p)
        along_query = ds * r.unsqueeze(-1)
        dvalues = torch.bmm(p, dh)
        dvalues.flatten(0, 1).addmm_(along_query.flatten(0, 1), queries)
        along_value = (ds * logits).sum(-1, keepdim=True).mul_(r.square().unsqueeze(-1)).div_(d)
        dvalues.addcmul_(along_value, values, value=-1.0)
        dqueries = along_query.flatten(0, 1).t() @ values.flatten(0, 1)
        dsources = [grad.to(source.dtype) for grad, source in zip(dvalues.unbind(1), sources, strict=True)]
        return (dqueries, None, *dsources, *(None for _ in inv_rms))


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: int,
        stream_dtype: torch.dtype,
        norm: Norm | None,
        weight: Tensor | None,
        bias: Tensor | None,
        query: Tensor,
        output: Tensor,
        lse: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        opens, inv_rms = rest[:k], rest[k:]
        dtype = lse.dtype
        query = query.to(dtype)
        if k:
            values = [source.to(dtype) for source in opens]
            scores = torch.stack([(v @ query).mul_(r) for v, r in zip(values, inv_rms, strict=True)], 1)
            joint = torch.logaddexp(lse, scores.logsumexp(1))
            p = (scores - joint.unsqueeze(1)).exp_()
            if k == 1:
                h = torch.lerp(output, values[0], p)
            else:
                h = output * (lse - joint).exp_().unsqueeze(1)
                for j, value in enumerate(values):
                    h.addcmul_(p[:, j : j + 1], value)
        else:
            h, joint, scores = output.clone(), lse.clone(), lse.new_empty((lse.shape[0], 0))
        h = h.to(stream_dtype)
        if norm is None:
            ctx.save_for_backward(h, None, None, None, query, joint, lse, scores, *rest)
            x, seen = h, joint.new_empty(0)
        else:
            x, rstd = normalise(h.to(dtype), norm._replace(weight=weight, bias=bias))
            seen = h
            ctx.save_for_backward(h, rstd, weight, bias, query, joint, lse, scores, *rest)
        ctx.k, ctx.norm = k, norm
        ctx.mark_non_differentiable(seen, joint, scores)
        return x, seen, joint, scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, norm = ctx.k, ctx.norm
        h, rstd, weight, bias, query, joint, lse, scores, *rest = ctx.saved_tensors
        opens, inv_rms = rest[:k], rest[k:]
        h = h.to(lse.dtype)
        d = h.shape[-1]
        if norm is None:
            dh, dweight, dbias = grads[0].to(h.dtype), None, None
            delta = (dh * h).sum(-1)
        else:
            dh, dweight, dbias, delta = normalise_backward(grads[0], h, rstd, norm._replace(weight=weight, bias=bias))
        if not k:
            return (None, None, None, dweight, dbias, None, dh, -delta)
        sealed = (lse - joint).exp_()
        p = (scores - joint.unsqueeze(1)).exp_()
        dopens, dquery = [], torch.zeros_like(query)
        for j, (source, r) in enumerate(zip(opens, inv_rms, strict=True)):
            value = source.to(h.dtype)
            ds = (dh * value).sum(-1).sub_(delta).mul_(p[:, j])
            along_query = ds * r
            grad = _source_gradient(
                dh * p[:, j : j + 1], along_query, (along_query * r).mul_(scores[:, j]).div_(d), query, value
            )
            dopens.append(grad.to(source.dtype))
            dquery += along_query @ value
        doutput = dh * sealed.unsqueeze(1)
        return (None, None, None, dweight, dbias, dquery, doutput, -sealed * delta, *dopens, *(None for _ in inv_rms))


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
    return SealedReads(out[:reads], out[reads : 2 * reads], out[-1])


def merge(
    output: Tensor,
    lse: Tensor,
    opens: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    query: Tensor,
    norm: Norm | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Merged:
    """Phase 2: finish one read with its k open sources (k may be 0), then its norm.

        h = (1 - sum_j p_j) o + sum_j p_j v_j,    p = softmax over [lse, s_1 .. s_k],    x = norm(h)

    Args:
        output, lse: (T, d) and (T,), one read of `read_sealed`.
        opens: k tensors (..., d); inv_rms: k tensors (...,); query: (d,), pseudo-query times key gain.
        norm: the norm that consumes the read; None returns h as x.
        dtype: h is rounded to this (the stream's own dtype) and kept so for backward; None keeps the compute dtype.
    """
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    plain = None if norm is None else norm._replace(weight=None, bias=None)
    with torch.autocast(output.device.type, enabled=False):
        x, h, joint, scores = _Merge.apply(
            len(opens), dtype or lse.dtype, plain, weight, bias, query, output, lse, *_flat(opens), *_flat_scalars(inv_rms)
        )
    return Merged(x, x.detach() if norm is None else h, joint, scores)


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
    dtype = compute_dtype(sources[0].dtype)
    inv_rms = [inverse_rms(source, eps).to(dtype) for source in sources]
    scaled = query if gain is None else query * gain
    sealed = read_sealed(sources, inv_rms, scaled.unsqueeze(0))
    if norm is not None and norm.out_dtype is None:
        norm = norm._replace(out_dtype=sources[0].dtype)
    merged = merge(sealed.outputs[0], sealed.lse[0], (), (), scaled, norm, dtype=sources[0].dtype)
    x = merged.x.view(shape)
    if not return_weights:
        return x
    weights = (sealed.logits[:, :, 0] - merged.lse.unsqueeze(1)).exp()
    return x, weights.t().reshape(len(sources), *shape[:-1])
