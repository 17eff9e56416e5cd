"""The arithmetic of both phases and of their backward, in plain torch: any device, any floating dtype.

This is the fallback of every faster backend, each of which is a module with these four functions. Shapes: T tokens,
n sealed sources, k open sources, S reads, d width. Vectors may have any dtype; arithmetic is in that of `inv_rms`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .norms import Norm, normalise, normalise_backward


class MergeSaved(NamedTuple):
    """What the backward of a merge needs: the read, 1/rms of it, and with k > 0 open sources their weights (T, k), the
    sealed sources' weight (T,) and the open sources' logits (T, k)."""

    h: Tensor
    rstd: Tensor | None = None
    weights: Tensor | None = None
    sealed: Tensor | None = None
    scores: Tensor | None = None


class MergeGrads(NamedTuple):
    output: Tensor
    top: Tensor | None
    opens: list[Tensor]
    query: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _token_major(sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(T, n, d) in the compute dtype: transient, so that one matrix product serves all sources of a token."""
    first = sources[0]
    if all(source.dtype == dtype for source in sources):
        return torch.stack(tuple(sources), 1)
    values = first.new_empty((first.shape[0], len(sources), first.shape[1]), dtype=dtype)
    for i, source in enumerate(sources):
        values[:, i].copy_(source)
    return values


def read_sealed(
    queries: Tensor, sources: Sequence[Tensor], inv_rms: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Phase 1: S outputs (T, d), the largest logit and the sum of exponentials relative to it (S, T), logits (T, n, S).

    A maximum and a sum, not their log-sum-exp: rounding that would cost a digit where logits are of order ten.
    """
    values = _token_major(sources, inv_rms[0].dtype)
    logits = (values @ queries.t()).mul_(torch.stack(tuple(inv_rms), 1).unsqueeze(-1))
    top = logits.amax(1)
    p = (logits - top.unsqueeze(1)).exp_()
    total = p.sum(1)
    outputs = torch.bmm(p.div_(total.unsqueeze(1)).transpose(1, 2), values)
    return list(outputs.unbind(1)), top.t(), total.t(), logits


def read_sealed_backward(
    queries: Tensor,
    sources: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    logits: Tensor,
    grads: Sequence[Tensor],
    dtop: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """dqueries (S, d) and the gradient of each source, from S gradients (T, d) and (T,)."""
    d = queries.shape[1]
    values = _token_major(sources, logits.dtype)
    r = torch.stack(tuple(inv_rms), 1)
    p = logits.softmax(1)
    dh = torch.stack(tuple(grads), 1)
    ds = torch.bmm(values, dh.transpose(1, 2)).add_(torch.stack(tuple(dtop), 1).unsqueeze(1)).mul_(p)
    along_query = ds * r.unsqueeze(-1)
    dvalues = torch.bmm(p, dh)
    dvalues.flatten(0, 1).addmm_(along_query.flatten(0, 1), queries)
    along_value = (ds * logits).sum(-1, keepdim=True).mul_(r.square().unsqueeze(-1)).div_(d)
    dvalues.addcmul_(along_value, values, value=-1.0)
    dqueries = along_query.flatten(0, 1).t() @ values.flatten(0, 1)
    return dqueries, [grad.to(source.dtype) for grad, source in zip(dvalues.unbind(1), sources, strict=True)]


def merge(
    opens: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    query: Tensor | None,
    output: Tensor,
    top: Tensor | None,
    total: Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
) -> tuple[Tensor, MergeSaved]:
    """Phase 2 and the norm: x (T, d) and what its backward needs. h is rounded to `dtype` (before a norm, if any).

    Without open sources it is a norm alone, and `top` and `total` are not used.
    """
    h, seen = output, MergeSaved(output)
    if opens:
        assert query is not None and top is not None and total is not None
        values = [source.to(top.dtype) for source in opens]
        scores = torch.stack([(v @ query).mul_(r) for v, r in zip(values, inv_rms, strict=True)], 1)
        joint = torch.maximum(top, scores.amax(1))
        p = (scores - joint.unsqueeze(1)).exp_()
        sealed = (top - joint).exp_().mul_(total)
        whole = sealed + p.sum(1)
        sealed, p = sealed.div_(whole), p.div_(whole.unsqueeze(1))
        seen = MergeSaved(output, None, p, sealed, scores)
        if len(opens) == 1:
            h = torch.lerp(output, values[0], p)
        else:
            h = output * sealed.unsqueeze(1)
            for j, value in enumerate(values):
                h.addcmul_(p[:, j : j + 1], value)
    elif not output.is_contiguous():
        h = output.contiguous()  # a slice of all reads' outputs: keeping it would keep them all
    if norm is None:  # <dh, h> is then a true term of the gradient: h is kept unrounded
        return h.to(dtype), seen._replace(h=h)
    h = h.to(dtype)
    x, rstd = normalise(h.to(torch.promote_types(dtype, torch.float32)), norm)
    return x, seen._replace(h=h, rstd=rstd)


def merge_backward(
    grad: Tensor,
    opens: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    query: Tensor | None,
    norm: Norm | None,
    saved: MergeSaved,
) -> MergeGrads:
    """Gradients of a merge; that of `top` follows the convention of two_phase.py."""
    h = saved.h.to(torch.promote_types(saved.h.dtype, torch.float32))
    d = h.shape[-1]
    if norm is None:
        dh, dweight, dbias = grad.to(h.dtype), None, None
        delta = (dh * h).sum(-1)
    else:
        assert saved.rstd is not None
        dh, dweight, dbias, delta = normalise_backward(grad, h, saved.rstd, norm)
    if not opens:
        return MergeGrads(dh, -delta, [], None, dweight, dbias)
    assert query is not None and saved.weights is not None and saved.sealed is not None and saved.scores is not None
    dopens, dquery = [], torch.zeros_like(query)
    for j, (source, r) in enumerate(zip(opens, inv_rms, strict=True)):
        value, p = source.to(h.dtype), saved.weights[:, j]
        ds = (dh * value).sum(-1).sub_(delta).mul_(p)
        along_query = ds * r
        along_value = (along_query * r).mul_(saved.scores[:, j]).div_(d)
        dopen = (dh * p.unsqueeze(1)).addr_(along_query, query)
        dopens.append(dopen.addcmul_(along_value.unsqueeze(-1), value, value=-1.0).to(source.dtype))
        dquery += along_query @ value
    return MergeGrads(dh * saved.sealed.unsqueeze(1), -saved.sealed * delta, dopens, dquery, dweight, dbias)
