"""The subject of the checks: a mechanism with its settings, and a small network of it with fixed sublayers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.errors import UserError, first_line
from attnres.ops import Norm
from attnres.residuals.base import Residual
from attnres.residuals.registry import make_residual, residual_class
from attnres.residuals.state import State, Ways

WIDTH = 16
DEPTHS = (1, 2, 3, 8)
"""Numbers of sublayers of the checked networks, if the settings allow them."""
MAX_DEPTH = 32
"""If the settings allow none of `DEPTHS`, other depths up to this are tried."""
ROUNDING = 1e-9
"""Largest relative difference in fp64 that counts as rounding."""
EPS = 0.1
"""Eps of the norms, large enough that the scale of a read matters."""


class Failed(Exception):
    """Raised by a check with its finding, in a few words."""


def expect(condition: bool, finding: str) -> None:
    """Raise `Failed` with the finding unless the condition holds."""
    if not condition:
        raise Failed(finding)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of `b` if that exceeds one; infinite
    for different shapes or if a value is not finite."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    largest = ((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item()
    return largest if largest == largest else float("inf")


def close(a: Tensor, b: Tensor, what: str, bound: float = ROUNDING) -> float:
    """Return the distance of two tensors; raise `Failed` with `what` if it exceeds the bound."""
    far = distance(a, b)
    expect(
        far <= bound,
        f"{what}: " + (f"{tuple(a.shape)} is not {tuple(b.shape)}" if a.shape != b.shape else f"{far:.1e}"),
    )
    return far


class Subject(NamedTuple):
    """A mechanism with its settings.

    Attributes:
        mechanism: its class. settings: arguments of its constructor.
        depths: numbers of sublayers to check, in order.
    """

    mechanism: type[Residual]
    settings: dict[str, Any]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, name: str, settings: dict[str, Any]) -> "Subject":
        """Find the mechanism, and the depths that these settings allow.

        Raises:
            UserError: an unknown name or setting; settings that fit no depth up to `MAX_DEPTH`.
        """
        mechanism, refusal = residual_class(name), ""

        def fits(depth: int) -> bool:
            nonlocal refusal
            try:
                make_residual(mechanism.name, depth, WIDTH, **settings)
            except UserError as error:
                refusal = str(error)
                return False
            except Exception:  # the check of settings reports it
                return True
            return True

        depths = tuple(filter(fits, DEPTHS)) or tuple(filter(fits, range(1, MAX_DEPTH + 1)))[:3]
        if not depths:
            raise UserError(f"residual '{name}' fits no network of 1 to {MAX_DEPTH} sublayers: {refusal}")
        return cls(mechanism, settings, depths)

    @property
    def depth(self) -> int:
        """Return the largest depth, for checks that use one."""
        return self.depths[-1]

    def residual(
        self, depth: int | None = None, *, stirred: bool = True, dtype: torch.dtype = torch.float64
    ) -> Residual:
        """Return a residual of `depth` sublayers, with parameters of `dtype`; `stirred` moves them away from their
        start values."""
        residual = make_residual(self.mechanism.name, self.depth if depth is None else depth, WIDTH, **self.settings)
        residual = residual.to(dtype)
        if stirred:
            stir(residual)
        return residual

    def networks(self) -> Iterator[tuple[Residual, "Network"]]:
        """Yield a residual and a network of each depth, in fp64."""
        for depth in self.depths:
            yield self.residual(depth), Network(depth)


@torch.no_grad()
def stir(residual: Residual) -> None:
    """Change every parameter by numbers up to 0.4 that depend only on its position."""
    draw = torch.Generator().manual_seed(1)
    for parameter in residual.parameters():
        noise = 0.8 * torch.rand(parameter.shape, generator=draw, dtype=torch.float64) - 0.4
        parameter.add_(noise.to(parameter.dtype))


def tokens(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random vectors (*shape, d) of length near sqrt(d)."""
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


Change = Callable[[int, State], State]
"""Called with the state before each sublayer and before the output's read; the pass continues with the returned
state."""


def collecting(states: list[State]) -> Change:
    """Return a function that appends the state before each sublayer and before the output's read to `states`."""

    def change(index: int, state: State) -> State:
        states.append(state)
        return state

    return change


class Network:
    """L pre-norm sublayers f_l(x) = tanh(W_l x) with fixed random matrices and norm gains.

    For `Ways`, f_l = tanh((W_l - K_l - V_l) query + K_l key + V_l value), which is the same if all three are equal.

    Args:
        eps: eps of the norms.
        fused: pass norms as values (`Norm`), as models do, instead of functions.
        outputs: L tensors (..., d) that sublayers write, whatever they read.
    """

    def __init__(
        self,
        depth: int,
        dtype: torch.dtype = torch.float64,
        *,
        eps: float = EPS,
        fused: bool = False,
        outputs: Sequence[Tensor] | None = None,
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        self.depth, self.eps, self.fused, self.outputs = depth, eps, fused, outputs
        self.matrices = torch.randn(depth, WIDTH, WIDTH, generator=draw, dtype=torch.float64).to(dtype) / 2
        self.gains = (torch.rand(depth + 1, WIDTH, generator=draw, dtype=torch.float64) + 0.5).to(dtype)
        parts = torch.randn(2, depth, WIDTH, WIDTH, generator=draw, dtype=torch.float64) / 2
        self.keys, self.values = parts.to(dtype)

    def norm(self, index: int) -> Any:
        """Return the norm of a read, as a value or as a function."""
        gain = self.gains[index]
        if self.fused:
            return Norm(gain, eps=self.eps)
        return lambda h: gain * h * (h.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def sublayer(self, index: int, x: Tensor | Ways) -> Tensor:
        """Return the output of sublayer `index`."""
        if self.outputs is not None:
            return self.outputs[index]
        whole = self.matrices[index]
        if isinstance(x, Tensor):
            return torch.tanh(x @ whole)
        key, value = self.keys[index], self.values[index]
        return torch.tanh(x.query @ (whole - key - value) + x.key @ key + x.value @ value)

    def step(self, residual: Residual, index: int, state: State) -> State:
        """Return the state after sublayer `index`."""
        x, state = residual("read", state, index, self.norm(index))
        return residual("write", state, index, self.sublayer(index, x))

    def run(
        self, residual: Residual, embedding: Tensor, change: Change | None = None, around: Callable | None = None
    ) -> Tensor:
        """Return the head's input (..., d) for an embedding. `around` calls a step with its arguments, as activation
        checkpointing does."""
        state = residual("start", embedding)
        for index in range(self.depth):
            state = state if change is None else change(index, state)
            state = self.step(residual, index, state) if around is None else around(self.step, residual, index, state)
        state = state if change is None else change(self.depth, state)
        return residual("finish", state, self.norm(self.depth))

    def gradients(self, residual: Residual, embedding: Tensor, **how: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the head's input, and the gradients of a fixed function of it with respect to the embedding and each
        parameter."""
        embedding = embedding.detach().requires_grad_()
        leaves = [embedding, *(p for p in residual.parameters() if p.requires_grad)]
        result = self.run(residual, embedding, **how)
        upstream = tokens(*result.shape[:-1], seed=3).to(result.dtype)
        grads = torch.autograd.grad((result * upstream).sum(), leaves, allow_unused=True, materialize_grads=True)
        return result.detach(), list(grads)


def agree(
    one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]], what: str, bound: float = ROUNDING
) -> float:
    """Return the largest distance of two results with their gradients; raise `Failed` if it exceeds the bound."""
    far = close(one[0], other[0], f"{what} changes the result", bound)
    return max(far, *(close(a, b, f"{what} changes a gradient", bound) for a, b in zip(one[1], other[1], strict=True)))


def summary(error: Exception) -> str:
    """Return an exception as a finding."""
    return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {first_line(error)}"
