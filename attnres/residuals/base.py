"""What a residual is: a network's depth as a stream with two verbs, read and write."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..ops import Norm, apply_norm

NormLike = Norm | Callable[[Tensor], Tensor]
"""The norm a read ends with: as a value where its arithmetic is known (then it can be fused), else as a function."""

State = Any
"""A residual's state: an immutable (nested) tuple of tensors, their number a function of depth alone."""


class Observer(Protocol):
    """Sees what a forward pass really does, without changing it."""

    def on_read(self, index: int, h: Tensor, weights: Tensor | None, sources: Sequence[str]) -> None:
        """Read `index` made `h` (..., d) before its norm, from `sources` with `weights` (tokens, sources)."""

    def on_write(self, index: int, output: Tensor) -> None:
        """Sublayer `index` wrote `output` (..., d)."""


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number of at least `least`; else a UserError that names the setting."""
    if type(value) is not int or value < least:
        raise UserError(f"{name} is {value!r}: expected a whole number, at least {least}")
    return value


def positive(name: str, value: Any) -> float:
    """`value` if it is a positive number; else a UserError that names the setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{name} is {value!r}: expected a positive number")
    return float(value)


def start_at(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter start values that `torch.nn.init` has no function for; one already loaded is left alone."""
    nn.init.zeros_(parameter)
    if not getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(value)


class Residual(nn.Module):
    """How the sublayers of one network are connected: their reads and writes, and the parameters these have.

    A *sublayer* is one attention or one MLP; `num_sublayers` is their number L. Reads are numbered 0 .. L-1, the
    output's is L. All parameters of a residual live in this one module: it is small, always fp32, and takes no weight
    decay. `read`, `write` and `finish` never change a state in place.

    A mechanism is a subclass with a `name`, whose keyword arguments after `width` are its settings.
    """

    name: ClassVar[str]

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__()
        self.num_sublayers, self.width = num_sublayers, width
        self.observer: Observer | None = None

    def init_parameters(self) -> None:
        """Set every parameter of this module to its start value (through `torch.nn.init` or `start_at`)."""

    def branch_scale(self) -> float:
        """Factor on the start values of value, output and MLP weights (DeepNorm asks for one)."""
        return 1.0

    def start(self, embedding: Tensor) -> State:
        """The state that holds the token embedding (..., d) and nothing else."""
        raise NotImplementedError

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        """The normed input of sublayer `index`, and the state that its write continues from."""
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        """The state after sublayer `index` gave `output`."""
        raise NotImplementedError

    def finish(self, state: State, norm: NormLike) -> Tensor:
        """The normed input of the head."""
        raise NotImplementedError

    def hidden_state(self, state: State) -> Tensor:
        """The state as one vector (..., d), for `output_hidden_states`: of depth reads, the sum of all sources."""
        raise NotImplementedError

    def normed(
        self, h: Tensor, index: int, norm: NormLike, weights: Tensor | None = None, sources: Sequence[str] = ()
    ) -> Tensor:
        """norm(h) as read `index`, shown to the observer: for mechanisms whose read is not fused with its norm."""
        if self.observer is not None:
            if weights is None and len(sources) == 1:
                weights = h.new_ones(h[..., 0].numel(), 1)
            self.observer.on_read(index, h, weights, sources)
        return apply_norm(h, norm) if isinstance(norm, Norm) else norm(h)


def full_precision(reference: Tensor) -> torch.autocast:
    """Autocast off: depth mixing is a softmax or a sum of many terms, and bf16 loses it."""
    return torch.autocast(reference.device.type, enabled=False)
