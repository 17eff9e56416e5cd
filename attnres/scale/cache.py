"""What the stages of one rank share: slots that never change, and the gradients that later stages owe earlier ones.

Three autograd nodes do it, without a private name of torch. A later stage of the rank *borrows* a slot that the rank
holds; the gradient it makes for it is left with the rank. The stage by which the slot came to the rank, or which made
it, *collects* what is owed when its own backward gets there, which in every schedule is later, and sends one gradient.
`Lend` hands the residual's parameters to a stage.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnres.residuals import Residual


class RankCache:
    """Slots held by (microbatch, name), and gradients owed to the stage that they came by.

    Attributes:
        unwanted: slots that no gradient is owed to.
        peak: bytes held at once, at most. The tensors are aliases of what autograd keeps anyway.
    """

    def __init__(self) -> None:
        self.held: dict[int, dict[str, Tensor]] = {}
        self.owed: dict[int, dict[str, Tensor]] = {}
        self.unwanted: set[tuple[int, str]] = set()
        self.peak = 0

    def keep(self, microbatch: int, name: str, tensor: Tensor) -> None:
        """Hold a slot until `drop`; the first one of its name counts."""
        self.held.setdefault(microbatch, {}).setdefault(name, tensor.detach())
        held = sum(t.numel() * t.element_size() for slots in self.held.values() for t in slots.values())
        self.peak = max(self.peak, held)

    def drop(self, microbatch: int) -> None:
        """Hold nothing of this microbatch any more."""
        self.held.pop(microbatch, None)

    def owe(self, microbatch: int, name: str, gradient: Tensor | None) -> None:
        """Leave a gradient for the stage that brought or made the slot, if it wants one."""
        if gradient is not None and (microbatch, name) not in self.unwanted:
            owed = self.owed.setdefault(microbatch, {})
            owed[name] = owed[name] + gradient if name in owed else gradient

    def collect(self, microbatch: int, name: str, gradient: Tensor | None) -> Tensor | None:
        """Return `gradient` with what is owed to the slot; nothing is owed to it then."""
        owed = self.owed.get(microbatch, {})
        left = owed.pop(name, None)
        if not owed:
            self.owed.pop(microbatch, None)
        if left is None or gradient is None:
            return left if gradient is None else gradient
        return gradient + left

    def want_none(self, microbatch: int, names: Sequence[str]) -> None:
        """Take no gradients for these slots until the step ends: all before them is frozen, so that nobody collects."""
        self.unwanted.update((microbatch, name) for name in names)

    def check(self) -> None:
        """After a step: nothing is held, nothing is owed. Raises RuntimeError."""
        self.unwanted.clear()
        if self.held or self.owed:
            held, owed = ({key: sorted(names) for key, names in part.items()} for part in (self.held, self.owed))
            self.held.clear()
            self.owed.clear()
            raise RuntimeError(f"a pipeline step left slots held {held} and gradients that nobody collected {owed}")


class Borrow(torch.autograd.Function):
    """Slots that the rank holds, for a later stage; their gradients are left with the rank.

    `anchor` is a tensor that the stage received: the node then lies on the way to the stage's inputs, and schedules
    that ask for gradients of these alone reach it.
    """

    @staticmethod
    def forward(
        ctx: Any, cache: RankCache, microbatch: int, names: Sequence[str], anchor: Tensor, *held: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.place = cache, microbatch, names
        return tuple(tensor.detach() for tensor in held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        cache, microbatch, names = ctx.place
        for name, gradient in zip(names, gradients, strict=True):
            cache.owe(microbatch, name, gradient)
        return (None,) * (4 + len(gradients))


class Collect(torch.autograd.Function):
    """Slots as they are; backward adds what later stages of the rank owe them.

    What comes out is no view and has gradients that are contiguous, as sending asks.
    """

    @staticmethod
    def forward(ctx: Any, cache: RankCache, microbatch: int, names: Sequence[str], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.place = cache, microbatch, names
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        cache, microbatch, names = ctx.place
        sums = (cache.collect(microbatch, name, gradient) for name, gradient in zip(names, gradients, strict=True))
        return (None, None, None, *(None if total is None else total.contiguous() for total in sums))


class Lend(torch.autograd.Function):
    """Parameters as tensors of a microbatch's graph; their gradients are added to the parameters in the very pass that
    makes the gradients of the stage's inputs.

    As parameters they would tie all reads of a stage into one group for the zero-bubble schedules' pass of weights,
    which then runs through a graph that is freed.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Sequence[nn.Parameter], anchor: Tensor, *values: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for parameter, gradient in zip(ctx.parameters, gradients, strict=True):
            if gradient is not None and parameter.requires_grad:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return (None,) * (2 + len(gradients))


def lent(residual: Residual, anchor: Tensor) -> Residual:
    """Return the residual as a view whose parameters are lent; itself where no gradient is wanted."""
    named = dict(residual.named_parameters())
    if not named or not anchor.requires_grad:
        return residual
    tensors = Lend.apply(tuple(named.values()), anchor, *(parameter.detach() for parameter in named.values()))
    values = dict(zip(named, tensors, strict=True))

    def view(module: nn.Module, prefix: str) -> Any:
        twin = copy.copy(module)
        twin.__dict__ = dict(module.__dict__)
        inner = {name: child and view(child, f"{prefix}{name}.") for name, child in module._modules.items()}
        twin.__dict__["_modules"] = inner
        twin.__dict__["_parameters"] = {name: values.get(prefix + name) for name in module._parameters}
        return twin

    return view(residual, "")
