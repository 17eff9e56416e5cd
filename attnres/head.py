"""The output head of a language model, separated from its body: losses computed from few rows of logits at a time.

With a large vocabulary the logits of a batch are the largest tensor of a step, and a cross-entropy in fp32 holds
several of that size: 8 x 2,048 tokens and 151,936 words make 10 GB each. Here the logits, losses and gradients of a
part of the tokens are computed together in the forward pass, so that nothing of that size is stored for backward or
computed twice. The matrix products are those of the whole batch (as in Liger Kernel, arXiv 2410.10989).
"""

import functools
import importlib
import importlib.util
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.device import autocast_dtype

POSITIONS = 256
"""Positions of which an fp32 copy is made at a time when no gradient is needed: with a large vocabulary logits are the
largest tensor."""


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put the model into evaluation mode inside the block, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def whole_sequences() -> Generator[None]:
    """Let Transformers treat a batch without a mask as whole sequences, without searching it for packed ones.

    The search waits for the device. In a captured or compiled pass, where it cannot wait, Transformers makes a mask of
    all pairs, and attention takes a slower kernel that reads it; up to 5.17 at least it makes one there in any case.
    """
    from transformers import masking_utils  # here, because `attnres` is imported without Transformers

    ours = {"find_packed_sequence_indices": _none_packed, "is_tracing": _not_traced}
    theirs = {name: getattr(masking_utils, name) for name in ours if hasattr(masking_utils, name)}
    for name in theirs:
        setattr(masking_utils, name, ours[name])
    try:
        yield
    finally:
        for name, function in theirs.items():
            setattr(masking_utils, name, function)


def _none_packed(position_ids: Tensor) -> None:
    return None


def _not_traced(tensor: Any = None) -> bool:
    return False


def log_probs(logits: Tensor) -> Tensor:
    """Return the log-probabilities in nats over the last axis, in fp32, or in fp64 for fp64 logits."""
    return logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -ln p of every target in nats: logits (B, T, V), targets (B, T) int64 -> (B, T) fp32, or fp64 for fp64
    logits."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    size = targets.shape[1] if logits.requires_grad else max(1, POSITIONS // len(targets))
    losses = [
        F.cross_entropy(part.to(dtype).flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        for part, target in zip(logits.split(size, 1), targets.split(size, 1), strict=True)
    ]
    return torch.cat(losses, 1)


def next_token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return -ln p in nats of every token after the first: ids (B, T) -> (B, T - 1), without a cache."""
    logits = model(input_ids=ids, use_cache=False).logits
    return token_losses(logits[:, :-1], ids[:, 1:].to(logits.device))


PART = 1 << 24
"""Most logits that a CPU computes at a time (at least one row); other devices, which need larger products, eight times
as many."""


@dataclass(frozen=True)
class Head:
    """Computes logits from hidden states x: z = (W x + b) / scale and then, with a cap c, c tanh(z / c).

    Attributes:
        weight, bias: (V, d), and (V,) or None.
        scale: the divisor of logits in Granite, else 1.
        cap: the bound of logits in Gemma 2, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states (..., d) in fp32 (fp64 for fp64); the product itself follows autocast."""
        z = F.linear(hidden, self.weight, self.bias)
        return self.after(z.to(torch.promote_types(z.dtype, torch.float32)))

    def after(self, z: Tensor) -> Tensor:
        """Apply scale and cap to z = W x + b, and return the logits."""
        if self.scale != 1:
            z = z / self.scale
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)

    def before(self, grad: Tensor, z: Tensor) -> Tensor:
        """Return the gradient with respect to W x + b, given that of the logits z, which is changed in place."""
        if self.cap is not None:
            grad.mul_(1 - (z / self.cap).square_())
        return grad if self.scale == 1 else grad.div_(self.scale)


class Soft(NamedTuple):
    """The teacher in the loss (1 - w) CE + w T^2 KL: its head, its hidden states (..., d), w and T."""

    head: Head
    hidden: Tensor
    weight: float
    temperature: float


class LossSums(NamedTuple):
    """Sums over tokens in nats, fp32 scalars: the objective, the cross-entropy in it, and T^2 KL (0 without a teacher).
    Only the objective has a gradient."""

    objective: Tensor
    cross_entropy: Tensor
    divergence: Tensor


# ------------------------------------------------------------------ of a model


def body_of(model: Any) -> nn.Module:
    """Return the part of a causal language model that gives the head its hidden states."""
    return getattr(model, model.base_model_prefix, model)


def head_of(model: Any) -> Head | None:
    """Return the head of a Hugging Face model; None if its config and module do not show it to be a `Head`."""
    module = model.get_output_embeddings()
    if type(module) is not nn.Linear or body_of(model) is model:
        return None
    scale, cap = (getattr(model.config, name, None) for name in ("logits_scaling", "final_logit_softcapping"))
    return Head(module.weight, module.bias, 1.0 if scale is None else scale, cap)


@torch.no_grad()
def is_apart(model: Any) -> bool:
    """Return whether the model's own forward pass equals its body followed by `head_of`. It is tried on a few tokens,
    and on values from -200 to 200 in place of the head's output, which shows how the model transforms logits."""
    head = head_of(model)
    if head is None:
        return False
    ids = torch.arange(min(8, len(head.weight)), device=head.weight.device)[None]
    seen: list[Tensor] = []

    def replace(module: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor:
        seen.extend((args[0], torch.linspace(-200, 200, z.numel(), device=z.device).view(z.shape).to(z.dtype)))
        return seen[-1]

    handle = model.get_output_embeddings().register_forward_hook(replace)
    try:
        with evaluating(model):
            logits = model(input_ids=ids, use_cache=False).logits
            hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    rtol, atol = (1e-2, 1e-2) if logits.element_size() < 4 else (1e-4, 1e-5)
    pairs = ((hidden, seen[0]), (head.after(seen[1]), logits))
    return all(torch.allclose(ours, theirs, rtol=rtol, atol=atol) for ours, theirs in pairs)


# ------------------------------------------------------------------ losses in parts


def logits_at_a_time(device: torch.device) -> int:
    """Return the most logits that are computed in one part; a part has at least one token."""
    return PART if device.type == "cpu" else 8 * PART


def is_small(model: Any, tokens: int, device: torch.device) -> bool:
    """Return whether the logits of this many tokens are computed at once on `device` by default."""
    output = model.get_output_embeddings()
    return output is None or tokens * len(output.weight) <= 2 * logits_at_a_time(device)


def parts(targets: Tensor, vocabulary: int) -> int:
    """Return the number of parts in which the logits of the targets are computed."""
    return -(-targets.numel() // max(1, logits_at_a_time(targets.device) // vocabulary))


def losses_in_parts(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return -ln p of every target in nats, without gradients: hidden (B, T, d), targets (B, T) -> (B, T) fp32 or
    fp64."""
    count = parts(targets, len(head.weight))
    pairs = zip(hidden.flatten(0, 1).chunk(count), targets.flatten().chunk(count), strict=True)
    with torch.no_grad():
        return torch.cat([F.cross_entropy(head.logits(x), y, reduction="none") for x, y in pairs]).view(targets.shape)


def sums_in_parts(head: Head, hidden: Tensor, targets: Tensor, soft: Soft | None = None) -> LossSums:
    """Sum the losses of a batch: hidden (B, T, d), targets (B, T) int64. Gradients are computed in this call, once; a
    second backward pass through the sums is refused."""
    return LossSums(*_InParts.apply(hidden, head.weight, head.bias, targets, head, soft))


def called_losses(model: Any, call: dict[str, Any], y: Tensor, kind: str) -> Tensor:
    """Return the cross-entropy in nats of a model called with these arguments: with gradients the sum (1,), else that
    of every token (B, T)."""
    if kind == "whole":
        losses = token_losses(model(**call, use_cache=False).logits, y)
        return losses.sum().view(1) if torch.is_grad_enabled() else losses
    hidden, head = body_of(model)(**call, use_cache=False).last_hidden_state, cast(Head, head_of(model))
    if not torch.is_grad_enabled():
        return losses_in_parts(head, hidden, y)
    return sums_in_parts(head, hidden, y).objective.view(1)


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, soft: Soft | None
    ) -> tuple[Tensor, ...]:
        needs_grad = ctx.needs_input_grad[:3]
        dtype = autocast_dtype(hidden.device.type) or weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        in_dtype = Head(weight.to(dtype), None if bias is None else bias.to(dtype), head.scale, head.cap)
        sums = torch.zeros(3, dtype=exact, device=hidden.device)
        count = parts(targets, len(weight))
        to_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=exact) if needs_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and needs_grad[2] else None
        x_parts, y_parts = hidden.flatten(0, -2).chunk(count), targets.flatten().chunk(count)
        t_parts = [None] * len(x_parts) if soft is None else soft.hidden.flatten(0, -2).chunk(count)
        begin = 0
        for x, y, theirs in zip(x_parts, y_parts, t_parts, strict=True):
            x = x.to(dtype)
            grad, part = _part(in_dtype, x, y, soft, theirs)
            sums += part
            grad = grad.to(dtype)
            if to_hidden is not None:
                to_hidden.flatten(0, -2)[begin : begin + len(y)] = grad @ in_dtype.weight
            if to_weight is not None:
                if dtype == exact:
                    to_weight.addmm_(grad.t(), x)
                else:
                    to_weight += grad.t() @ x
            if to_bias is not None:
                to_bias += grad.sum(0, dtype=exact)
            begin += len(y)
            del grad
        ctx.gradients = [
            None if one is None or of is None else one.to(of.dtype)
            for one, of in ((to_hidden, hidden), (to_weight, weight), (to_bias, bias))
        ]
        entropy, divergence = sums[1], sums[2]
        ctx.mark_non_differentiable(entropy, divergence)
        return sums[0], entropy, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss made in parts were handed out already: do one backward pass")
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if one is None else one.mul_(grads[0]) for one in gradients), None, None, None)


def _is_fused(x: Tensor) -> bool:
    """Return whether the losses and gradients of hidden states like x are computed by the one kernel of
    `attnres.loss_kernel`."""
    # CUDA only, asked here without the table of devices, which lies in a higher module
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _part(head: Head, x: Tensor, y: Tensor, soft: Soft | None, theirs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return, for x (n, d) and y (n,), the gradient of the summed objective with respect to W x + b, (n, V), and the
    three sums."""
    if soft is None and _is_fused(x):
        from attnres.loss_kernel import losses_and_gradients

        grad = F.linear(x, head.weight, head.bias)
        entropy = losses_and_gradients(grad, y, head.scale, head.cap).sum()
        return grad, torch.stack([entropy, entropy, torch.zeros_like(entropy)])
    z = head.logits(x)
    rows = torch.arange(len(y), device=y.device)
    logp = F.log_softmax(z, -1)
    entropy = -logp[rows, y].sum()
    grad = logp.exp_()
    grad[rows, y] -= 1
    if soft is None or theirs is None:
        return head.before(grad, z), torch.stack([entropy, entropy, torch.zeros_like(entropy)])
    weight, temperature = soft.weight, soft.temperature
    ours = F.log_softmax(z / temperature, -1)
    target = F.log_softmax(soft.head.logits(theirs) / temperature, -1)
    divergence = temperature**2 * F.kl_div(ours, target, reduction="sum", log_target=True)
    grad.mul_(1 - weight).add_(ours.exp_().sub_(target.exp_()), alpha=weight * temperature)
    objective = (1 - weight) * entropy + weight * divergence
    return head.before(grad, z), torch.stack([objective, entropy, divergence])
