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

Both hand the sources on: whoever reads them next uses the ones that came out. The gradient that later reads leave
for a source then arrives in the backward of the earlier read, whose own pass adds to it: no sum is made apart.

Shapes: T tokens (leading axes flattened), n sources, S reads, d width. All arithmetic is in the compute dtype (at
least fp32), whatever the sources' dtypes are, also under autocast.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from attnres.ops import plain, registered
from attnres.ops.dispatch import backend_for, in_two_phases
from attnres.ops.eager import MergeSaved
from attnres.ops.norms import Norm
from attnres.ops.reference import compute_dtype, scaled_query
from attnres.ops.sharded import refuse_sharded, settled


class SealedReads(NamedTuple):
    """Phase 1 of S reads: what each of them holds before its open sources are known.

    Attributes:
        sources: the sources, to be used from now on in place of those given.
        outputs: S tensors (T, d), each read's mixture of the sealed sources.
        top: S tensors (T,), the largest of its logits.
        total: S tensors (T,), the sum of exp(logit - top); no gradient.
        logits: (T, n, S), no gradient.
    """

    sources: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    top: tuple[Tensor, ...]
    total: tuple[Tensor, ...]
    logits: Tensor

    def read(self, index: int) -> "SealedRead":
        """Phase 1 of the read `index`."""
        return SealedRead(self.outputs[index], self.top[index], self.total[index], self.sources, self.logits, index)


class SealedRead(NamedTuple):
    """Phase 1 of one read: its output, top and total, and where it comes from (sources, all logits, which of them)."""

    output: Tensor
    top: Tensor
    total: Tensor
    sources: tuple[Tensor, ...]
    logits: Tensor
    index: int


class Merged(NamedTuple):
    """A finished read. `h`, `sealed` and `weights` carry no gradient and are there to be looked at.

    Attributes:
        x: the read after its norm (or the read itself without one), of the open sources' shape; (T, d) without any.
        opens: the open sources, `added` in the last one, to be used from now on in place of those given.
        h: (T, d), the read before its norm.
        sealed: (T,), the weight of the sealed sources together; each one's is this times their softmax.
        weights: (T, k), those of the open sources.
    """

    x: Tensor
    opens: tuple[Tensor, ...]
    h: Tensor
    sealed: Tensor
    weights: Tensor


def _flat(tensors: Sequence[Any]) -> list[Any]:
    """(..., d) as (T, d), None as it is, what a collective is still writing once it is there."""
    flat = []
    for t in tensors:
        if t is not None:
            t = (t if type(t) is Tensor else settled(t)).reshape(-1, t.shape[-1])
        flat.append(t)
    return flat


def _handed_on(sources: Sequence[Tensor]) -> list[Tensor]:
    """The sources as new outputs of a Function, not as views of its inputs: FSDP2 warns of views, each costs a node."""
    handed_on = []
    for source in sources:
        handed_on.append(source.detach())
    return handed_on


class _Unrecorded:
    """Stands for a Function's context where no gradient is wanted."""

    def set_materialize_grads(self, value: bool) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def _apply(function: "type[_ReadSealed | _Merge]", *arguments: Any) -> tuple[Tensor, ...]:
    refuse_sharded(arguments)
    if plain.is_needed():
        return function.plainly(*arguments)
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Unrecorded(), *arguments)


class _ReadSealed(torch.autograd.Function):
    @staticmethod
    def plainly(
        queries: Tensor, eps: float, dtype: torch.dtype, compute: torch.dtype, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        """What `forward` returns, of operations that autograd itself differentiates."""
        outputs, top, total, logits = plain.read_sealed(queries.to(compute), sources, eps, dtype)
        return (*outputs, *top, *total, logits.reshape(-1, *logits.shape[-2:]), *sources)

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, eps: float, dtype: torch.dtype, compute: torch.dtype, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        queries, flat = queries.to(compute), _flat(sources)
        compiling = torch.compiler.is_compiling()
        ctx.backend = registered if compiling else backend_for(flat, compute, dtype, reads=len(queries))
        outputs, top, total, logits, inv_rms = ctx.backend.read_sealed(queries, flat, eps, dtype)
        ctx.save_for_backward(queries, logits, inv_rms, *sources)
        ctx.dtype = dtype
        totals = total.unbind(0)
        ctx.mark_non_differentiable(logits, *totals)
        return (*outputs, *top.unbind(0), *totals, logits, *_handed_on(sources))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plain.refuse_second_derivative()
        queries, logits, inv_rms, *sources = ctx.saved_tensors
        shape, sources = sources[0].shape, _flat(sources)
        reads, (tokens, d) = queries.shape[0], sources[0].shape
        # A read that nothing used has no gradient.
        outputs = [queries.new_zeros(tokens, d, dtype=ctx.dtype) if g is None else g for g in grads[:reads]]
        tops = [queries.new_zeros(tokens) if g is None else g for g in grads[reads : 2 * reads]]
        with torch.autocast(queries.device.type, enabled=False):  # a backward may be called under autocast too
            dqueries, dsources = ctx.backend.read_sealed_backward(
                queries, sources, inv_rms, logits, outputs, tops, _flat(grads[-len(sources) :])
            )
        return (dqueries, None, None, None, *(grad.view(shape) for grad in dsources))


class _Merge(torch.autograd.Function):
    @staticmethod
    def plainly(
        k: int,
        index: int,
        recompute: bool,
        dtype: torch.dtype,
        eps: float,
        norm: Norm | None,
        weight: Tensor | None,
        bias: Tensor | None,
        query: Tensor | None,
        output: Tensor | None,
        top: Tensor | None,
        total: Tensor | None,
        added: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """What `forward` returns, of operations that autograd itself differentiates."""
        norm = None if norm is None else norm._replace(weight=weight, bias=bias)
        x, h, sealed, weights, opens = plain.merge(rest[:k], added, query, eps, output, top, total, norm, dtype)
        flat_weights = weights.reshape(sealed.numel(), weights.shape[-1])
        return (x, *_flat([h]), sealed.reshape(-1), flat_weights, *opens)

    @staticmethod
    def forward(
        ctx: Any,
        k: int,
        index: int,
        recompute: bool,
        dtype: torch.dtype,
        eps: float,
        norm: Norm | None,
        weight: Tensor | None,
        bias: Tensor | None,
        query: Tensor | None,
        output: Tensor | None,
        top: Tensor | None,
        total: Tensor | None,
        added: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        # rest: k open sources; then, if the read is to be made again in backward, the sealed ones and their logits.
        ctx.set_materialize_grads(False)
        opens, recomputed = rest[:k], rest[k:]
        shape = opens[0].shape if k else cast(Tensor, output).shape
        flat_output, flat_added, *flat = _flat((output, added, *opens))
        if norm is not None:
            norm = norm._replace(weight=weight, bias=bias)
        out_dtype = dtype if norm is None else norm.out_dtype or dtype
        vectors = flat if flat_output is None else [*flat, flat_output]
        vectors = vectors if flat_added is None else [*vectors, flat_added]
        compute = torch.promote_types(dtype, torch.float32)
        compiling = torch.compiler.is_compiling()
        ctx.backend = registered if compiling else backend_for(vectors, compute, dtype, out_dtype, opens=k)
        x, saved, partial = ctx.backend.merge(flat, flat_added, query, eps, flat_output, top, total, norm, dtype)
        scored = opens if partial is None else (*opens[:-1], partial.view(shape))
        ctx.save_for_backward(weight, bias, query, None if recompute else saved.h, *saved[1:], *scored, *recomputed)
        ctx.k, ctx.index, ctx.recompute, ctx.h_dtype = k, index, recompute, saved.h.dtype
        ctx.norm = norm and norm._replace(weight=None, bias=None)
        ctx.has_output, ctx.has_top, ctx.has_added = output is not None, top is not None, partial is not None
        ctx.shape, ctx.x_dtype = shape, x.dtype
        # What is only looked at; empty where it is an input, x itself or known beforehand.
        none = x.new_empty(0)
        h = saved.h if k and norm is not None else none
        weights = none.clone() if saved.weights is None else saved.weights
        sealed = none.clone() if saved.sealed is None else saved.sealed
        ctx.mark_non_differentiable(h, sealed, weights)
        x = (x.clone() if x is flat_output else x).view(shape)
        return (x, h, sealed, weights, *_handed_on(scored))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plain.refuse_second_derivative()
        k, count = ctx.k, len(MergeSaved._fields)
        weight, bias, query, *rest = ctx.saved_tensors
        saved, recomputed = MergeSaved(*rest[:count]), rest[count + k :]
        grad, *flat = _flat((grads[0], *rest[count : count + k], *grads[4:]))
        opens, carried = flat[:k], flat[k:]
        if ctx.recompute:
            with torch.autocast(opens[0].device.type if opens else recomputed[0].device.type, enabled=False):
                saved = saved._replace(h=_read_again(ctx.backend, recomputed, ctx.index, opens, saved, ctx.h_dtype))
        norm = ctx.norm and ctx.norm._replace(weight=weight, bias=bias)
        shape = ctx.shape
        grad = saved.h.new_zeros(saved.h.shape, dtype=ctx.x_dtype) if grad is None else grad
        with torch.autocast(grad.device.type, enabled=False):
            d = ctx.backend.merge_backward(grad, carried, opens, query, norm, saved)
        output = d.output if ctx.has_output else None
        if output is not None and not k:
            output = output.view(shape)  # that of a norm alone may have any shape
        dopens = []
        for dopen in d.opens:
            dopens.append(dopen.view(shape))
        added = dopens[-1] if ctx.has_added else None
        top = d.top if ctx.has_top else None
        none = (None,) * 6
        return (*none, d.weight, d.bias, d.query, output, top, None, added, *dopens, *(None,) * len(recomputed))


def _read_again(
    backend: ModuleType,
    recomputed: Sequence[Tensor],
    index: int,
    opens: Sequence[Tensor],
    saved: MergeSaved,
    dtype: torch.dtype,
) -> Tensor:
    """The read before its norm, from its weights: what `recompute` does instead of keeping it."""
    parts = [] if saved.weights is None else [saved.weights]
    if recomputed:
        weights = recomputed[-1][:, :, index].softmax(1)
        parts.insert(0, weights if saved.sealed is None else weights * saved.sealed.unsqueeze(1))
    weights = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return backend.mix([*_flat(recomputed[:-1]), *opens], weights.contiguous(), dtype)


def read_sealed(
    sources: Sequence[Tensor], queries: Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None
) -> SealedReads:
    """Phase 1: S reads over n sealed sources in one pass.

    Args:
        sources: n tensors (..., d), of any floating dtypes.
        queries: (S, d), each pseudo-query times its key gain.
        eps: of the key norm.
        dtype: outputs are stored in it. None is the compute dtype on a CPU, where they stay in the cache, and the first
            source's own elsewhere.
    """
    first = sources[0]
    compute = compute_dtype(first.dtype)
    if dtype is None:
        dtype = compute if first.device.type == "cpu" else first.dtype
    reads, n = queries.shape[0], len(sources)
    with torch.autocast(first.device.type, enabled=False):
        out = _apply(_ReadSealed, queries, eps, dtype, compute, *sources)
    return SealedReads(out[-n:], out[:reads], out[reads : 2 * reads], out[2 * reads : 3 * reads], out[3 * reads])


def merge(
    read: SealedRead | None,
    opens: Sequence[Tensor],
    added: Tensor | None,
    query: Tensor | None,
    norm: Norm | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> Merged:
    """Phase 2: finish one read with its k open sources (k may be 0), then its norm.

        v_k = opens[-1] + added
        h = (1 - sum_j p_j) o + sum_j p_j v_j,    p = softmax over [top + log(total), s_1 .. s_k],    x = norm(h)

    Args:
        read: one read of `read_sealed`; None reads the open sources alone, in one pass.
        opens: k tensors (..., d). added: (..., d), what has still to be added to the last of them, or None.
        query: (d,), pseudo-query times key gain; None if there are no open sources.
        norm: the norm that consumes the read; None returns h as x.
        eps: of the key norm.
        dtype: h and the last open source's sum are rounded to this (the stream's own dtype); None is that of the first
            open source or else of phase 1's output.
        recompute: keep no h for backward, but make it again there from the sources and their weights.
    """
    vectors = [*opens, *([read.output] if read else [])]
    dtype = dtype or vectors[0].dtype
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    plain = None if norm is None else norm._replace(weight=None, bias=None, out_dtype=norm.out_dtype or dtype)
    recomputed = [*read.sources, read.logits] if recompute and read else []
    with torch.autocast(vectors[0].device.type, enabled=False):
        x, h, sealed, weights, *handed_on = _apply(
            _Merge,
            len(opens),
            read.index if read else 0,
            recompute,
            dtype,
            eps,
            plain,
            weight,
            bias,
            query,
            *((read.output, read.top, read.total) if read else (None, None, None)),
            added,
            *opens,
            *recomputed,
        )
    if not opens:
        assert read is not None
        return Merged(x, (), read.output.detach(), torch.ones_like(read.top), x.new_empty(x.shape[0], 0))
    return Merged(x, tuple(handed_on), _flat([x.detach()])[0] if norm is None else h, sealed, weights)


def apply_norm(h: Tensor, norm: Norm) -> Tensor:
    """norm(h) for h (..., d), with a backward of its own that saves h and one scalar a token.

    Every residual of this package uses it, the standard one included, so that comparisons compare residuals.
    """
    plain = norm._replace(weight=None, bias=None, out_dtype=norm.out_dtype or h.dtype)
    with torch.autocast(h.device.type, enabled=False):
        none = (None,) * 3
        return _apply(_Merge, 0, 0, False, h.dtype, 0.0, plain, norm.weight, norm.bias, None, h, *none)[0]


def depth_read(
    sources: Sequence[Tensor],
    query: Tensor,
    gain: Tensor | None = None,
    *,
    norm: Norm | None = None,
    eps: float = 1e-6,
    return_weights: bool = False,
    checkpoint_level: int = 0,
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
        checkpoint_level: 0 keeps h for backward; 1 keeps only its weights and makes h again from the sources.

    Returns:
        h, or norm(h), of the sources' shape and the first source's dtype (`norm.out_dtype` if given); then the weights
        if asked for. Logits, softmax and statistics are in fp32 (fp64 for fp64 sources).

    Raises:
        ValueError: no source, shapes that do not fit, or another checkpoint level.

    Source: arXiv 2603.15031.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("depth_read got no sources: expected a list of at least one tensor (..., d)")
    if checkpoint_level not in (0, 1):
        raise ValueError(
            f"depth_read got checkpoint_level={checkpoint_level!r}: expected 0 (keep h) or 1 (make it again)"
        )
    shape = sources[0].shape
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"depth_read got source 0 of shape {tuple(shape)} and source {i} of {tuple(source.shape)}")
    for name, vector in (("query", query), ("gain", gain)):
        if vector is not None and vector.shape != shape[-1:]:
            raise ValueError(f"depth_read got {name} of shape {tuple(vector.shape)}: expected ({shape[-1]},)")
    dtype, n = sources[0].dtype, len(sources)
    if n == 1:  # the source itself, exactly, and exactly no gradient for its query
        weights = torch.ones((1, *shape[:-1]), dtype=compute_dtype(dtype), device=sources[0].device)
        h = sources[0] + (scaled_query(query, gain) * 0.0).sum().to(dtype)
        x = h if norm is None else apply_norm(h, norm)
        return (x, weights) if return_weights else x
    scaled = scaled_query(query, gain)
    sources = [source.reshape(-1, shape[-1]) for source in sources] if len(shape) == 1 else sources
    if norm is not None and norm.out_dtype is None:
        norm = norm._replace(out_dtype=dtype)
    how = {"eps": eps, "dtype": dtype, "recompute": bool(checkpoint_level)}
    if in_two_phases(n, 1, training=torch.is_grad_enabled(), opens=0):
        sealed = read_sealed(sources, scaled.unsqueeze(0), eps=eps)
        merged = merge(sealed.read(0), (), None, None, norm, **how)
        weights = sealed.logits[:, :, 0].softmax(1)
    else:
        merged = merge(None, sources, None, scaled, norm, **how)
        weights = merged.weights
    x = merged.x.view(shape)
    return (x, weights.t().reshape(n, *shape[:-1])) if return_weights else x
