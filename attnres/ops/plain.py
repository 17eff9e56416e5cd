"""Both phases as differentiable torch operations, for cases in which the kernels' own backward cannot be used.

These are torch.func's transforms, forward-mode derivatives, exports and traces, which are recognised, and second
derivatives, which are refused outside `plain_torch`. A compiler also fuses these operations into one kernel a read,
where calling an opaque operator would cost more than a short read does.
"""

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from attnres.errors import UserError
from attnres.ops.backend import MergeInputs, is_read_rounded
from attnres.ops.devices import KERNELS
from attnres.ops.norms import Norm
from attnres.ops.precision import compute_dtype, rounded_sum

MOST_COMPILED = 40
"""Most tensors of a read that a compiler is given as torch operations; its work grows with their square."""

_PROXY = torch._C._TorchDispatchModeKey.PROXY
"""Key of the dispatch mode of `make_fx`, which records operations."""

# asked by every read
_is_functorch_active, _is_tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_dispatch_mode = torch._C._get_dispatch_mode

_asked: ContextVar[bool] = ContextVar("plain_torch", default=False)


@contextmanager
def plain_torch() -> Generator[None]:
    """Compute depth reads inside the block with plain torch operations: slower, and with derivatives of any order.

    Under activation checkpointing the block has to be open in backward too, where layers run again.

    >>> import attnres
    >>> v, w = torch.ones(2, 3, 4, requires_grad=True), torch.ones(4)
    >>> with plain_torch():
    ...     h = attnres.depth_read(list(v * torch.tensor([1.0, 2.0]).view(2, 1, 1)), w)
    >>> (first,) = torch.autograd.grad(h.square().sum(), v, create_graph=True)
    >>> torch.autograd.grad(first.square().sum(), v)[0].isfinite().all()
    tensor(True)
    """
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def is_needed() -> bool:
    """Return whether the kernels' own backward cannot be used here (see the module's docstring)."""
    if torch.compiler.is_compiling():
        return torch.compiler._is_exporting_flag  # in PyTorch 2.11 dynamo evaluates is_exporting() to True, always
    return is_transformed()


def is_transformed() -> bool:
    """Return `is_needed` for code that no compiler traces."""
    transformed = _is_functorch_active() or forward_ad._current_level >= 0 or _is_tracing()
    return transformed or _asked.get() or _dispatch_mode(_PROXY) is not None


def is_compiled(tensors: Sequence[Tensor | None], source: Tensor, *, phase: int, opens: int) -> bool:
    """Return whether a compiler is tracing that makes phase 1 or 2 of these tensors, with `opens` open sources, faster
    than this package's operators."""
    if not torch.compiler.is_compiling() or len(tensors) > MOST_COMPILED:
        return False
    kernels = KERNELS.get(source.device.type)
    if kernels is None or (kernels.most_open is not None and opens > kernels.most_open):
        return False
    return source.numel() <= kernels.few_compiled.get(phase, -1)


def refuse_second_derivative() -> None:
    """Raise a UserError in a backward of this package if a graph of it is requested, because that graph would lack
    paths."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UserError(
            "a derivative of a gradient was asked for (create_graph=True), which the backward of depth reads does not "
            "have: run the forward pass inside `with attnres.ops.plain_torch():`, which has derivatives of any order"
        )


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1) + eps).rsqrt()


def read_sealed(
    queries: Tensor, sources: Sequence[Tensor], eps: float, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Return outputs, top, total and logits as in `two_phase.SealedReads`, for sources (..., d); here `top` is the
    whole log-sum-exp and `total` is one. Their gradients are those of the kernels: see `merge`."""
    values = torch.stack([source.to(queries.dtype) for source in sources], -2)
    logits = (values @ queries.t()) * _inverse_rms(values, eps).unsqueeze(-1)
    top = logits.logsumexp(-2)
    shares = (logits - top.detach().unsqueeze(-2)).exp()
    outputs = (shares.transpose(-1, -2) @ values).to(dtype)
    tops = [one.reshape(-1) for one in top.unbind(-1)]
    return list(outputs.unbind(-2)), tops, [torch.ones_like(one) for one in tops], logits.detach()


def merge(m: MergeInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Return (x, h, sealed, weights, opens) of one read, as `eager.merge` computes them; vectors are (..., d).

    Phase 1 gives o = sum_j exp(s_j - c) v_j with c = log sum exp(s_j) held fixed, and here
    h = (exp(c) o + sum_k exp(s_k) v_k) / (exp(top) + sum_k exp(s_k)) with the same c, which is the softmax read for
    any c. So the gradients that pass between the phases are those of the kernels, whichever of them makes either
    phase, and derivatives of any order are right.
    """
    opens, added, query, eps, output, top, total, norm, dtype, _ = m
    compute = compute_dtype(dtype)
    if added is not None:
        opens = [*opens[:-1], rounded_sum(opens[-1], added, dtype)]
    h: Any = output if output is not None else opens[0]
    shares = [torch.ones_like(h[..., 0], dtype=compute)]
    values = [source.to(compute) for source in opens]
    numerators = logits = [] if query is None else [(v @ query.to(compute)) * _inverse_rms(v, eps) for v in values]
    if top is not None:
        assert output is not None and total is not None
        joint = (top + total.log()).reshape(output.shape[:-1])
        values = [output.to(compute), *values]
        numerators, logits = [joint.detach(), *logits], [joint, *logits]
    if logits:
        highest = functools.reduce(torch.maximum, logits).detach()
        mass = functools.reduce(torch.add, [(logit - highest).exp() for logit in logits])
        shares = [(numerator - highest).exp() / mass for numerator in numerators]
        h = functools.reduce(torch.add, [share.unsqueeze(-1) * v for share, v in zip(shares, values, strict=True)])
    if norm is None or is_read_rounded(h, dtype):
        h = h.to(dtype)
    x = h if norm is None else apply(h.to(compute), norm).to(norm.out_dtype or dtype)
    p = torch.stack(shares, -1).detach()
    sealed, weights = (p[..., 0], p[..., 1:]) if output is not None else (torch.zeros_like(p[..., 0]), p)
    return x, h.detach().to(dtype), sealed, weights, list(opens)


def apply(h: Tensor, norm: Norm) -> Tensor:
    """Apply the norm to h (..., d), which is in the compute dtype."""
    weight, bias = (None if v is None else v.to(h.dtype) for v in (norm.weight, norm.bias))
    if norm.center:
        return F.layer_norm(h, h.shape[-1:], weight, bias, norm.eps)
    y = h * _inverse_rms(h, norm.eps).unsqueeze(-1)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
