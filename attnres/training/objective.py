"""The loss that a training step minimises, computed in one forward pass of a module, so that DDP sees the head too.

With a teacher (knowledge distillation) the model also learns the next-token distribution of the model it started from:

    loss = (1 - w) CE(y, z) + w T^2 KL( softmax(t / T) || softmax(z / T) )

for each token, in nats: logits z of the model, t of the teacher, y the next token; w is `distill_weight` and T
`distill_temperature`. T^2 keeps the gradient's size as T grows (Hinton et al., arXiv 1503.02531). The teacher sees the
same batches, is frozen, and computes its logits in evaluation mode in the run's precision.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.errors import UserError
from attnres.head import (
    Head,
    LossSums,
    Soft,
    body_of,
    called_losses,
    head_of,
    is_apart,
    is_small,
    sums_in_parts,
    token_losses,
    whole_sequences,
)


@dataclass(frozen=True)
class Teacher:
    """The model that training started from, frozen."""

    model: nn.Module
    weight: float
    temperature: float


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL( softmax(teacher / T) || softmax(logits / T) ) in nats: (..., vocabulary) twice -> (...), fp32."""
    ours = F.log_softmax(logits.float() / temperature, dim=-1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


Cast = Callable[[], AbstractContextManager[Any]]
"""Returns the context of a forward pass: bf16 autocast, or none."""


def precision(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: none for "fp32", autocast over fp32 parameters for "bf16"."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()


def loss_kind(choice: str, model: Any, tokens: int, teacher: Teacher | None = None) -> str:
    """Return how the loss of a micro-batch of so many tokens is computed: "whole" or "chunked".

    Args:
        choice: one of these, or "auto", which is chunked if there are more than two parts and the model's head can be
            called separately.

    Raises:
        UserError: the choice is impossible with this model on this machine.
    """
    device = next(model.parameters()).device
    if choice == "whole" or (choice == "auto" and is_small(model, tokens, device)):
        return "whole"
    has_heads = is_apart(model) and (teacher is None or is_apart(teacher.model))
    if choice == "auto":
        return "chunked" if has_heads else "whole"
    if not has_heads:
        raise UserError(
            f"loss is {choice} and the head of {type(model).__name__} does more than attnres knows of: choose whole"
        )
    return choice


class Objective(nn.Module):
    """Computes the summed losses of a batch.

    Args:
        kind: "whole" or "chunked", see `loss_kind`.
        cast: returns the precision context of a forward pass.
        compiled: whether the model, up to its logits or hidden states, runs through torch.compile.
    """

    def __init__(
        self, model: Any, kind: str, cast: Cast, teacher: Teacher | None = None, *, compiled: bool = False
    ) -> None:
        super().__init__()
        self.model, self.kind, self.cast, self.teacher = model, kind, cast, teacher
        run = model if kind == "whole" else body_of(model)
        # in a tuple, so that it is not registered as a submodule
        self._run = (torch.compile(run) if compiled else run,)

    def forward(self, x: Tensor, y: Tensor, *, eager: bool = False, held_out: bool = False) -> Any:
        """Return the summed losses of a batch, x, y (B, T) int64. `eager` does not use the compiled model. With
        `held_out`, return the losses of its tokens instead, also without it."""
        with torch.compiler.set_stance("force_eager") if eager or held_out else nullcontext():
            if held_out:
                return held_out_losses(self.model, x, y, self.cast, self.kind)
            return self._sums(x, y)

    def _sums(self, x: Tensor, y: Tensor) -> LossSums:
        teacher_output = None if self.teacher is None else self._teach(self.teacher, x)
        (run,) = self._run
        with self.cast(), whole_sequences():
            output = run(input_ids=x, use_cache=False)
            if self.kind == "chunked":
                soft = None
                if self.teacher is not None and teacher_output is not None:
                    head = cast(Head, head_of(self.teacher.model))
                    soft = Soft(head, teacher_output, self.teacher.weight, self.teacher.temperature)
                return sums_in_parts(cast(Head, head_of(self.model)), output.last_hidden_state, y, soft)
        entropy = token_losses(output.logits, y).sum()
        if self.teacher is None or teacher_output is None:
            return LossSums(entropy, entropy.detach(), torch.zeros_like(entropy))
        distilled = divergence(output.logits, teacher_output, self.teacher.temperature).sum()
        weight = self.teacher.weight
        return LossSums((1 - weight) * entropy + weight * distilled, entropy.detach(), distilled.detach())

    @torch.no_grad()
    def _teach(self, teacher: Teacher, x: Tensor) -> Tensor:
        """Return the teacher's logits, or its hidden states if the loss is computed from those."""
        with self.cast(), whole_sequences():
            if self.kind == "whole":
                return teacher.model(input_ids=x, use_cache=False).logits
            return body_of(teacher.model)(input_ids=x, use_cache=False).last_hidden_state


@torch.no_grad()
def held_out_losses(model: Any, x: Tensor, y: Tensor, cast_to: Cast, kind: str) -> Tensor:
    """Return the cross-entropy in nats of every token: x, y (B, T) int64 -> (B, T) fp32, whatever the dtype of the
    forward."""
    with cast_to():
        return called_losses(model, {"input_ids": x}, y, kind)
