"""Both phases and their backward in plain torch: any device, any floating dtype.

This is the fallback of every faster backend (`backend.Backend`), and the specification of each. Shapes: T tokens, n
sealed sources, k open sources, S reads, d width. Vectors may have any dtype; arithmetic is in the compute dtype: at
least fp32, fp64 for fp64 sources.

The functions at the end are the backend. They take vectors (..., d), reshape them to (T, d) and call the functions
above, which hold the formulas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.ops.backend import (
    MergeGradInputs,
    MergeGrads,
    MergeInputs,
    MergeSaved,
    ReadGradInputs,
    ReadInputs,
    Sealed,
    check_shapes,
    is_read_rounded,
    scalar_rows,
)
from attnres.ops.norms import inverse_rms, normalise, normalise_backward
from attnres.ops.precision import compute_dtype, full_precision, rounded_sum
from attnres.ops.sharded import settled


def _token_major(sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack the sources as (T, n, d) in the compute dtype, temporarily, so that one matrix product serves all sources
    of a token."""
    first = sources[0]
    if all(source.dtype == dtype for source in sources):
        return torch.stack(tuple(sources), 1)
    values = first.new_empty((first.shape[0], len(sources), first.shape[1]), dtype=dtype)
    for i, source in enumerate(sources):
        values[:, i].copy_(source)
    return values


def _read_sealed(r: ReadInputs) -> Sealed:
    """Compute phase 1. queries: (S, d), pseudo-query times key gain, in the compute dtype; outputs are stored in
    `dtype`."""
    queries, sources, eps, dtype = r
    values = _token_major(sources, queries.dtype)
    inv_rms = inverse_rms(values, eps)
    logits = (values @ queries.t()).mul_(inv_rms.unsqueeze(-1))
    top = logits.amax(1)
    p = (logits - top.unsqueeze(1)).exp_()
    total = p.sum(1)
    outputs = torch.bmm(p.div_(total.unsqueeze(1)).transpose(1, 2), values).to(dtype)
    # A slice of the stacked outputs would keep all of them alive as long as one is needed.
    return Sealed([o.contiguous() for o in outputs.unbind(1)], top.t(), total.t(), logits, inv_rms)


def _read_sealed_backward(r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]:
    """Return dqueries (S, d) and the gradient of each source, from the gradients (T, d) of S outputs and (T,) of S
    tops.

    `carried[j]`, the gradient of source j from later reads, is added in the same pass.
    """
    queries, sources, inv_rms, logits, grads, dtop, carried = r
    d = queries.shape[1]
    values = _token_major(sources, queries.dtype)
    p = logits.softmax(1)
    dh = torch.stack(tuple(grads), 1).to(queries.dtype)
    ds = torch.bmm(values, dh.transpose(1, 2)).add_(torch.stack(tuple(dtop), 1).unsqueeze(1)).mul_(p)
    along_query = ds * inv_rms.unsqueeze(-1)
    dvalues = torch.bmm(p, dh)
    dvalues.flatten(0, 1).addmm_(along_query.flatten(0, 1), queries)
    along_value = (ds * logits).sum(-1, keepdim=True).mul_(inv_rms.square().unsqueeze(-1)).div_(d)
    dvalues.addcmul_(along_value, values, value=-1.0)
    for j, grad in enumerate(carried):
        if grad is not None:
            dvalues[:, j] += grad
    dqueries = along_query.flatten(0, 1).t() @ values.flatten(0, 1)
    return dqueries, [grad.to(source.dtype) for grad, source in zip(dvalues.unbind(1), sources, strict=True)]


def _merge(m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]:
    """Compute phase 2 and the norm: x (T, d), the tensors that its backward needs, and the last open source with
    `added` in it.

        v_k = opens[-1] + added (rounded to `dtype`);    h = sealed * output + sum_j p_j v_j;    x = norm(h)

    h is rounded to `dtype` (before a norm, if `is_read_rounded`). Without `added` no source is returned. Without
    `output` (and `top` and `total`) there are no sealed sources: this is a whole read in one pass. Without open sources
    only the norm is applied. `eps` belongs to the key norm.
    """
    opens, added, query, eps, output, top, total, norm, dtype, _ = m
    compute = compute_dtype(dtype)
    partial = None
    if added is not None:
        partial = rounded_sum(opens[-1], added, dtype)
        opens = [*opens[:-1], partial]
    first = opens[0] if opens else output
    assert first is not None
    scalars = first.new_empty((scalar_rows(len(opens), sealed=output is not None), len(first)), dtype=compute)
    rstd = scalars[0]
    if not opens:
        h = first
    else:
        assert query is not None
        query = query.to(compute)
        values = [source.to(compute) for source in opens]
        inv_rms = torch.stack([inverse_rms(v, eps) for v in values], 1)
        scores = torch.stack([v @ query for v in values], 1).mul_(inv_rms)
        sealed = None
        joint = scores.amax(1)
        if output is not None:
            assert top is not None and total is not None
            joint = torch.maximum(joint, top)
            sealed = (top - joint).exp_().mul_(total)
        p = (scores - joint.unsqueeze(1)).exp_()
        whole = p.sum(1) if sealed is None else p.sum(1) + sealed
        p = p.div_(whole.unsqueeze(1))
        if output is None:
            h = p[:, :1] * values[0]
            begin = 1
        else:
            assert sealed is not None
            h = output.to(compute) * sealed.div_(whole).unsqueeze(1)
            begin = 0
        for j in range(begin, len(values)):
            h.addcmul_(p[:, j : j + 1], values[j])
        parts = [p.flatten(), scores.flatten(), inv_rms.flatten(), *(() if sealed is None else (sealed,))]
        torch.cat(parts, out=scalars[1:].view(-1))
    if norm is None:  # <dh, h> then is a true term of the gradient, so h is stored unrounded
        return h.to(dtype), MergeSaved(h, scalars), partial
    if is_read_rounded(h, dtype):
        h = h.to(dtype)
    x, deviation = normalise(h.to(compute), norm)
    rstd.copy_(deviation)
    return x, MergeSaved(h, scalars), partial


def _merge_backward(m: MergeGradInputs) -> MergeGrads:
    """Return the gradients of a merge; that of `top` follows the convention of two_phase.py.

    `opens` are the sources that were scored (the last with `added` in it); `carried[j]`, the gradient of open source j
    from later reads, is added.
    """
    grad, carried, opens, query, norm, saved, *_ = m
    rstd, weights, sealed, scores, inv_rms = saved.named(len(opens), normed=norm is not None)
    h = _read_again(m, weights, sealed) if saved.h is None else saved.h
    h = h.to(compute_dtype(h.dtype))
    d = h.shape[-1]
    if norm is None:
        dh, dweight, dbias = grad.to(h.dtype), None, None
        delta = (dh * h).sum(-1)
    else:
        assert rstd is not None
        dh, dweight, dbias, delta = normalise_backward(grad, h, rstd, norm)
    if not opens:
        return MergeGrads(dh, -delta, [], None, dweight, dbias)
    assert query is not None and weights is not None and scores is not None and inv_rms is not None
    query = query.to(h.dtype)
    dopens, dquery = [], torch.zeros_like(query)
    for j, source in enumerate(opens):
        value, p, r, earlier = source.to(h.dtype), weights[:, j], inv_rms[:, j], carried[j]
        ds = (dh * value).sum(-1).sub_(delta).mul_(p)
        along_query = ds * r
        along_value = (along_query * r).mul_(scores[:, j]).div_(d)
        dopen = (dh * p.unsqueeze(1)).addr_(along_query, query).addcmul_(along_value.unsqueeze(-1), value, value=-1.0)
        dopens.append((dopen if earlier is None else dopen.add_(earlier)).to(source.dtype))
        dquery += along_query @ value
    if sealed is None:
        return MergeGrads(None, None, dopens, dquery, dweight, dbias)
    return MergeGrads(dh * sealed.unsqueeze(1), -sealed * delta, dopens, dquery, dweight, dbias)


def _read_again(m: MergeGradInputs, weights: Tensor | None, sealed: Tensor | None) -> Tensor:
    """Return h, which another backend has not saved, from phase 1's output, the open sources and their weights."""
    assert weights is not None
    parts, sources = [weights], [*m.opens]
    if m.output is not None and sealed is not None:
        parts, sources = [sealed.unsqueeze(1), weights], [m.output, *sources]
    h = mix(sources, torch.cat(parts, 1), weights.dtype)
    return h if m.norm is None or m.dtype is None or not is_read_rounded(h, m.dtype) else h.to(m.dtype)


def _rows(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Reshape vectors (..., d) to (T, d), pass on None, and wait for the result of a pending collective."""
    rows = []
    for t in tensors:
        if t is not None:
            t = (t if type(t) is Tensor else settled(t)).reshape(-1, t.shape[-1])
        rows.append(t)
    return rows


def _shaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Reshape (T, d) to `shape`, as a tensor that autograd does not see as a view: a view returned by a Function may
    not be changed in place."""
    return torch.ops.aten._unsafe_view(tensor, shape)


def read_sealed(r: ReadInputs, out: Sealed | None = None) -> Sealed:
    """Compute phase 1 of S reads. out: memory that a backend may use for the results; this one does not."""
    first = r.sources[0]
    check_shapes(r.sources, first.shape)
    check_shapes((r.queries,), (len(r.queries), first.shape[-1]))
    with full_precision(first):
        sealed = _read_sealed(r._replace(sources=_rows(r.sources)))
    return sealed._replace(outputs=[_shaped(output, first.shape) for output in sealed.outputs])


def read_sealed_backward(r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]:
    """Return dqueries (S, d) and the gradient of each source."""
    shape = r.sources[0].shape
    with full_precision(r.queries):  # a backward may be called under autocast too
        dqueries, dsources = _read_sealed_backward(
            r._replace(sources=_rows(r.sources), grads=_rows(r.grads), carried=_rows(r.carried))
        )
    return dqueries, [_shaped(grad, shape) for grad in dsources]


def merge(m: MergeInputs, partial: Tensor | None = None) -> tuple[Tensor, MergeSaved, Tensor | None]:
    """Compute phase 2 and the norm: return x, the tensors that backward needs, and the last open source with `added` in
    it, if there is one."""
    first = m.opens[0] if m.opens else m.output
    assert first is not None
    shape = first.shape
    check_shapes((m.added, m.output, *m.opens), shape)
    check_shapes((m.query,), shape[-1:])
    if not m.opens and m.norm is None:
        return first.to(m.dtype), MergeSaved(first), None
    added, output, *opens = _rows((m.added, m.output, *m.opens))
    with full_precision(first):
        x, (h, scalars), partial = _merge(m._replace(opens=opens, added=added, output=output))
    assert h is not None
    kept = _shaped(h, shape)
    return (
        kept if x is h else _shaped(x, shape),
        MergeSaved(first if h is output else kept, scalars),
        None if partial is None else _shaped(partial, shape),
    )


def merge_backward(m: MergeGradInputs) -> MergeGrads:
    """Return the gradients of a merge."""
    shape, k = m.grad.shape, len(m.opens)
    grad, h, output, *rows = _rows((m.grad, m.saved.h, m.output, *m.opens, *m.carried))
    saved = m.saved._replace(h=h)
    with full_precision(grad):
        grads = _merge_backward(m._replace(grad=grad, saved=saved, output=output, opens=rows[:k], carried=rows[k:]))
    output = None if grads.output is None else _shaped(grads.output, shape)
    return grads._replace(output=output, opens=[_shaped(grad, shape) for grad in grads.opens])


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_j weights[:, j] v_j in `dtype`: a read recomputed from its weights, (T, n) in the compute dtype."""
    with full_precision(weights):
        first, *others = _rows(sources)
        h = weights[:, :1] * first
        for j, source in enumerate(others, 1):
            h.addcmul_(weights[:, j : j + 1], source.to(h.dtype))
        return _shaped(h.to(dtype), sources[0].shape)
