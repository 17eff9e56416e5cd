"""The two-phase read with its own backward: sealed sources once per block, open sources as they come.

Pseudo-queries do not depend on the input, so all S reads of a block over the *sealed* sources are one pass
(`read_sealed`); each sublayer then merges the *open* sources (the running partial sum, or a group's outputs) by
online softmax and applies its norm (`merge`). Source: arXiv 2603.15031, Algorithm 1.

The backward (checked against autograd to fp64 rounding) never needs the phase-1 outputs. With the joint weights
p_j, logits s_j, r_j = 1/rms(v_j), the scaled query q = w * g and delta = <dh, h>:

    ds_j = p_j (<dh, v_j> - delta)
    dv_j = p_j dh + ds_j r_j q - ds_j s_j r_j^2 v_j / d
    dq   = sum_j ds_j r_j v_j

The two functions share this work. The backward of `merge` returns, for a phase-1 output o, (1 - p_open) dh, and for the
largest of its logits (`top`) the scalar -(1 - p_open) delta, which takes the place of the softmax's -<do, o>. If do is
returned in a narrow dtype, the scalar is -<do, h> of the rounded do: phase 1's <do, v> has the same rounding, and only
their difference counts. So the gradient of `top` is a private convention between the two, `total` has no gradient, and
neither function is used without the other.

Both return their sources, and the next read must use the returned ones. The gradient of a source from later reads then
arrives in the backward of the earlier read, which adds to it in its own pass: no separate sum is needed.

Shapes: T tokens (leading axes flattened), n sources, S reads, d width. All arithmetic is in the compute dtype (at
least fp32), whatever the sources' dtypes are, also under autocast.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops import plain, registered
from attnres.ops.backend import (
    Backend,
    MergeGradInputs,
    MergeInputs,
    MergeSaved,
    ReadGradInputs,
    ReadInputs,
)
from attnres.ops.devices import KERNELS
from attnres.ops.dispatch import backend_for
from attnres.ops.norms import Norm
from attnres.ops.precision import compute_dtype, full_precision, rounded_sum


class SealedReads(NamedTuple):
    """Phase 1 of S reads: each read's result before its open sources are known.

    Attributes:
        sources: the sources, to be used from now on in place of the arguments.
        outputs: S tensors of the sources' shape (..., d), each read's mixture of the sealed sources.
        top: S tensors (T,), the largest of a token's logits. total: the sum of exp(logit - top), (T,); no gradient.
            Plain torch has the whole log-sum-exp in `top` and one in `total`.
        logits: (T, n, S), no gradient.
    """

    sources: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    top: tuple[Tensor, ...]
    total: tuple[Tensor, ...]
    logits: Tensor

    def read(self, index: int) -> "SealedRead":
        """Return phase 1 of the read number `index`."""
        return SealedRead(self.outputs[index], self.top[index], self.total[index], self.sources, self.logits, index)


class SealedRead(NamedTuple):
    """Phase 1 of one read: its output, top and total, and the sources, all logits and the read's index."""

    output: Tensor
    top: Tensor
    total: Tensor
    sources: tuple[Tensor, ...]
    logits: Tensor
    index: int


class Merged(NamedTuple):
    """A finished read. `h`, `sealed` and `weights` carry no gradient and are for observers; None if nobody watches the
    read.

    Attributes:
        x: the read after its norm (or the read itself without one), of the sources' shape.
        opens: the open sources, with `added` in the last one, to be used from now on in place of the arguments.
        h: (T, d), the read before its norm.
        sealed: (T,), the total weight of the sealed sources; the weight of each is this times their softmax.
        weights: (T, k), the weights of the open sources.
    """

    x: Tensor
    opens: tuple[Tensor, ...]
    h: Tensor | None = None
    sealed: Tensor | None = None
    weights: Tensor | None = None


class _Form(NamedTuple):
    """All parameters of a merge, or of phase 1, that are no tensors. of_norm: the fields of a merge's norm after its
    weight and bias, None without one. index: number of the read in phase 1. recorded: gradients are enabled."""

    backend: Backend
    k: int
    eps: float
    dtype: torch.dtype
    recorded: bool
    of_norm: Any = None
    watched: bool = False
    recompute: bool = False
    index: int = 0
    phase: int = 2


class _Unrecorded:
    """Replaces a Function's context if no gradient is needed."""

    def set_materialize_grads(self, value: bool) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _ReadSealed(torch.autograd.Function):
    @staticmethod
    def plainly(form: _Form, queries: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        """Return the results of `forward`, computed in operations that autograd differentiates."""
        outputs, top, total, logits = plain.read_sealed(queries, sources, form.eps, form.dtype)
        return (*outputs, *top, *total, logits.reshape(-1, *logits.shape[-2:]), *sources)

    @staticmethod
    def forward(ctx: Any, form: _Form, queries: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        inputs = ReadInputs(queries, sources, form.eps, form.dtype)
        outputs, top, total, logits, inv_rms = form.backend.read_sealed(inputs)
        ctx.save_for_backward(queries, logits, inv_rms, *sources)
        ctx.form = form
        totals = total.unbind(0)
        ctx.mark_non_differentiable(logits, *totals)
        # Sources are handed on as new outputs, not as views of inputs: FSDP2 warns about views, and each costs a node.
        return (*outputs, *top.unbind(0), *totals, logits, *[source.detach() for source in sources])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plain.refuse_second_derivative()
        queries, logits, inv_rms, *sources = ctx.saved_tensors
        form, reads = ctx.form, queries.shape[0]
        outputs, tops, carried = grads[:reads], grads[reads : 2 * reads], grads[-len(sources) :]
        # A read that nothing used has no gradient.
        outputs = [sources[0].new_zeros(sources[0].shape, dtype=form.dtype) if g is None else g for g in outputs]
        tops = [queries.new_zeros(logits.shape[0]) if g is None else g for g in tops]
        inputs = ReadGradInputs(queries, sources, inv_rms, logits, outputs, tops, carried)
        dqueries, dsources = form.backend.read_sealed_backward(inputs)
        return (None, dqueries, *dsources)


class _Merge(torch.autograd.Function):
    @staticmethod
    def plainly(
        form: _Form,
        weight: Tensor | None,
        bias: Tensor | None,
        query: Tensor | None,
        output: Tensor | None,
        top: Tensor | None,
        total: Tensor | None,
        added: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the results of `forward`, computed in operations that autograd differentiates."""
        norm = None if form.of_norm is None else Norm(weight, bias, *form.of_norm)
        x, h, sealed, weights, opens = plain.merge(
            MergeInputs(rest[: form.k], added, query, form.eps, output, top, total, norm, form.dtype)
        )
        return (x, *opens, h, sealed.reshape(-1), weights.reshape(sealed.numel(), weights.shape[-1]))

    @staticmethod
    def forward(
        ctx: Any,
        form: _Form,
        weight: Tensor | None,
        bias: Tensor | None,
        query: Tensor | None,
        output: Tensor | None,
        top: Tensor | None,
        total: Tensor | None,
        added: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        # rest: k open sources; then, if the read is to be recomputed in backward, the sealed sources and their logits.
        ctx.set_materialize_grads(False)
        backend, k, eps, dtype, recorded, of_norm, watched, recompute, *_ = form
        opens = rest[:k]
        norm = None if of_norm is None else Norm(weight, bias, *of_norm)
        saves: Any = "h" if watched else "least" if recorded else "nothing"
        x, saved, partial = backend.merge(MergeInputs(opens, added, query, eps, output, top, total, norm, dtype, saves))
        if x is output:
            x = x.clone()
        output_dtype = None if output is None else output.dtype
        last_dtype = opens[-1].dtype if opens else None
        added_dtype = None
        if partial is not None:
            opens = (*opens[:-1], partial)
            added_dtype = None if added is None else added.dtype
        h, scalars = saved
        again = output if h is None and not recompute else None
        ctx.save_for_backward(weight, bias, query, again, None if recompute else h, scalars, *opens, *rest[k:])
        ctx.form = form, top is not None, output_dtype, last_dtype, added_dtype
        results = (x, *[source.detach() for source in opens])
        if not watched:
            return results
        # Results for observers only; empty if the value is an input, x itself or known beforehand.
        none, named = x.new_empty(0), saved.named(k, normed=norm is not None)
        h = none if h is None or not k or norm is None else h.to(dtype)
        weights = none.clone() if named.weights is None else named.weights
        sealed = none.clone() if named.sealed is None else named.sealed
        ctx.mark_non_differentiable(h, sealed, weights)
        return (*results, h, sealed, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plain.refuse_second_derivative()
        form, has_top, output_dtype, last_dtype, added_dtype = ctx.form
        backend, k, _, dtype, _, of_norm, _, recompute, *_ = form
        weight, bias, query, again, h, scalars, *rest = ctx.saved_tensors
        opens, recomputed, grad = rest[:k], rest[k:], grads[0]
        norm = None if of_norm is None else Norm(weight, bias, *of_norm)
        if grad is None:  # only the sources that the read handed on were used
            like = next(vector for vector in (h, again, *rest) if vector is not None)
            grad = like.new_zeros(like.shape, dtype=dtype if norm is None else norm.out_dtype)
        saved = MergeSaved(h, scalars)
        if recompute:
            h_dtype = compute_dtype(dtype) if norm is None else dtype
            saved = saved._replace(h=_read_again(form, recomputed, opens, saved, h_dtype))
        output, top, dopens, dquery, dweight, dbias, added = backend.merge_backward(
            MergeGradInputs(
                grad, grads[1 : 1 + k], opens, query, norm, saved, dtype, again, output_dtype, last_dtype, added_dtype
            )
        )
        if added is None and added_dtype is not None:
            added = dopens[-1]
        return (
            None,
            dweight,
            dbias,
            dquery,
            None if output_dtype is None else output,
            top if has_top else None,
            None,
            added,
            *dopens,
            *(None,) * len(recomputed),
        )


def _read_again(
    form: _Form,
    recomputed: Sequence[Tensor],
    opens: Sequence[Tensor],
    saved: MergeSaved,
    dtype: torch.dtype,
) -> Tensor:
    """Return the read before its norm, recomputed from its weights, for `recompute`."""
    _, weights, sealed, *_ = saved.named(form.k, normed=form.of_norm is not None)
    parts = [] if weights is None else [weights]
    if recomputed:
        shares = recomputed[-1][:, :, form.index].softmax(1)
        parts.insert(0, shares if sealed is None else shares * sealed.unsqueeze(1))
    every = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    sources = [*recomputed[:-1], *opens]
    return form.backend.mix(sources, every.contiguous(), dtype)


def _backend(
    vectors: Sequence[Tensor],
    parameters: tuple[Tensor | None, ...],
    compute: torch.dtype,
    *outputs: torch.dtype,
    reads: int = 1,
    opens: int = 0,
) -> Backend:
    """Return the backend of a call; while a compiler traces, the operators, each of which picks its backend when it
    runs."""
    if torch.compiler.is_compiling():
        return registered
    return backend_for(vectors, compute, *outputs, reads=reads, opens=opens, parameters=parameters)


def _run(function: "type[_ReadSealed | _Merge]", form: _Form, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the function's results, from a backend, or from torch operations if a backend cannot be used."""
    if form.backend is not registered and not plain.is_transformed():
        if form.recorded:
            return _recorded(function)(form, *arguments)
        return function.forward(_UNRECORDED, form, *arguments)
    first = next(argument for argument in reversed(arguments) if argument is not None)
    with full_precision(first):
        if plain.is_needed() or (
            not form.recompute and plain.is_compiled(arguments, first, phase=form.phase, opens=form.k)
        ):
            return function.plainly(form, *arguments)
        if form.recorded:
            return function.apply(form, *arguments)
        return function.forward(_UNRECORDED, form, *arguments)


@functools.cache
def _recorded(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the function's `apply` without its checks for torch.func, whose transforms take plain torch here."""
    above: Any = super(torch.autograd.Function, function)
    return above.apply


_UNRECORDED = _Unrecorded()


def read_sealed(
    sources: Sequence[Tensor], queries: Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None
) -> SealedReads:
    """Compute phase 1: S reads over n sealed sources in one pass.

    Args:
        sources: n tensors (..., d), of any floating dtypes.
        queries: (S, d), each pseudo-query times its key gain.
        eps: eps of the key norm.
        dtype: dtype of the stored outputs. None is the compute dtype if outputs stay in a cache (`Kernels.cached`),
            else the first source's dtype.
    """
    first = sources[0]
    compute = compute_dtype(first.dtype)
    if dtype is None:
        kernels = KERNELS.get(first.device.type)
        dtype = compute if kernels is not None and kernels.cached else first.dtype
    reads, n = queries.shape[0], len(sources)
    backend = _backend(sources, (queries,), compute, dtype, reads=reads)
    form = _Form(backend, 0, eps, dtype, torch.is_grad_enabled(), phase=1)
    out = _run(_ReadSealed, form, queries.to(compute), *sources)
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
    watched: bool = True,
) -> Merged:
    """Compute phase 2: finish one read with its k open sources (k may be 0), then apply its norm.

        v_k = opens[-1] + added
        h = (1 - sum_j p_j) o + sum_j p_j v_j,    p = softmax over [top + log(total), s_1 .. s_k],    x = norm(h)

    Args:
        read: one read of `read_sealed`; None reads the open sources alone, in one pass.
        opens: k tensors (..., d). added: (..., d), an output to be added to the last of them, or None.
        query: (d,), pseudo-query times key gain; None if there are no open sources.
        norm: the norm after the read; None returns h as x.
        eps: eps of the key norm.
        dtype: h and the last open source's sum are rounded to this (the stream's own dtype); None is that of the first
            open source or else of phase 1's output.
        recompute: do not store h for backward, but recompute it there from the sources and their weights.
        watched: also return h and the weights.
    """
    k, recomputed, index = len(opens), (), 0
    if k and query is None:
        raise UserError(f"a merge got {k} open sources and no query: expected a query (d,) that scores them")
    output = top = total = None
    vectors = [*opens]
    if read is not None:
        output, top, total, sources, logits, index = read
        vectors.append(output)
        if recompute:
            recomputed = (*sources, logits)
    if added is not None:
        vectors.append(added)
    dtype = out_dtype = dtype or vectors[0].dtype
    weight = bias = of_norm = None
    if norm is not None:
        weight, bias, norm_eps, center, out_dtype = norm
        out_dtype = out_dtype or dtype
        of_norm = norm_eps, center, out_dtype
    backend = _backend(vectors, (weight, bias, query), compute_dtype(dtype), dtype, out_dtype, opens=k)
    form = _Form(backend, k, eps, dtype, torch.is_grad_enabled(), of_norm, watched, recompute, index)
    out = _run(_Merge, form, weight, bias, query, output, top, total, added, *opens, *recomputed)
    x, handed_on = out[0], out[1 : 1 + k]
    if not watched:
        return Merged(x, handed_on)
    if not k:
        assert read is not None and output is not None
        h, tokens = output.detach(), read.top.numel()
        return Merged(x, (), h.reshape(-1, h.shape[-1]), read.top.new_ones(tokens), x.new_empty(tokens, 0))
    h, sealed, weights = out[1 + k :]
    h = x.detach() if norm is None else h
    return Merged(x, handed_on, h.reshape(-1, h.shape[-1]), sealed, weights)


class _RoundedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, y.dtype
        return torch.add(x, y, out=torch.empty_like(x, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.dtypes
        return grads[0].to(x), grads[0].to(y), None


def sealed_sum(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `precision.rounded_sum` of two tensors of one shape, in one pass if it narrows them; a compiler fuses it
    by itself."""
    wide = torch.promote_types(x.dtype, y.dtype)
    narrows = dtype != wide == torch.promote_types(wide, dtype)
    if narrows and type(x) is type(y) is Tensor and not torch.compiler.is_compiling() and not plain.is_transformed():
        return _recorded(_RoundedSum)(x, y, dtype)
    return rounded_sum(x, y, dtype)


def apply_norm(h: Tensor, norm: Norm) -> Tensor:
    """Return norm(h) for h (..., d), with a backward of its own that saves h and one scalar a token.

    Every residual of this package uses it, the standard one included, so that comparisons compare residuals.
    """
    weight, bias, eps, _, out_dtype = norm
    dtype = h.dtype
    out_dtype = out_dtype or dtype
    # the compiler fuses it with the operations around it
    if torch.compiler.is_compiling() and h.device.type in KERNELS:
        return plain.apply(h.to(compute_dtype(dtype)), norm).to(out_dtype)
    kernels = KERNELS.get(h.device.type)
    fits = weight is not None and weight.dtype == dtype and bias is None and not norm.center
    if fits and kernels is not None and not plain.is_transformed():
        if dtype == out_dtype and kernels.torch_norm:
            with full_precision(h):
                return torch.rms_norm(h, h.shape[-1:], weight, eps)
        if dtype == torch.float32 and h.numel() <= kernels.torch_norm:  # autocast leaves its result in fp32
            return torch.rms_norm(h, h.shape[-1:], weight, eps).to(out_dtype)
    backend = _backend((h,), (weight, bias), compute_dtype(dtype), dtype, out_dtype)
    form = _Form(backend, 0, 0.0, dtype, torch.is_grad_enabled(), (eps, norm.center, out_dtype))
    return _run(_Merge, form, weight, bias, None, h, None, None, None)[0]
