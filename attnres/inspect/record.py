"""What a forward (and backward) pass really did: magnitudes by depth, and where each read came from."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..residuals import Residual


def read_names(num_sublayers: int) -> list[str]:
    """Names of the L+1 reads: "attention 0", "mlp 0", ..., "output"."""
    return [f"{'mlp' if i % 2 else 'attention'} {i // 2}" for i in range(num_sublayers)] + ["output"]


class Trace:
    """Running means over everything recorded; memory does not grow with the number of batches.

    Attributes:
        num_sublayers: L.
        tokens: tokens recorded so far.
    """

    def __init__(self, num_sublayers: int, width: int) -> None:
        self.num_sublayers, self.width = num_sublayers, width
        self.tokens = 0
        self._output_squares = [0.0] * num_sublayers
        self._input_squares = [0.0] * (num_sublayers + 1)
        self._grad_squares = [0.0] * num_sublayers
        self._has_grads = False
        self._weights: list[Tensor | None] = [None] * (num_sublayers + 1)
        self._sources: list[list[str]] = [[] for _ in range(num_sublayers + 1)]

    # -- the observer of a residual ------------------------------------------------------------------------------
    def on_read(self, index: int, h: Tensor, weights: Tensor | None, sources: Sequence[str]) -> None:
        if index == 0:
            self.tokens += h.numel() // h.shape[-1]
        self._input_squares[index] += _sum_of_squares(h)
        if weights is not None:
            total = weights.detach().sum(0, dtype=torch.float64).cpu()
            seen = self._weights[index]
            self._weights[index] = total if seen is None else seen + total
            self._sources[index] = list(sources)

    def on_write(self, index: int, output: Tensor) -> None:
        self._output_squares[index] += _sum_of_squares(output)
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(lambda grad: self._on_grad(index, grad))

    def _on_grad(self, index: int, grad: Tensor) -> None:
        self._grad_squares[index] += _sum_of_squares(grad)
        self._has_grads = True

    # -- what was seen --------------------------------------------------------------------------------------------
    def _rms(self, squares: list[float]) -> list[float]:
        return [(s / max(1, self.tokens * self.width)) ** 0.5 for s in squares]

    @property
    def output_rms(self) -> list[float]:
        """L values: root mean square (over tokens and width) of each sublayer's output v_l."""
        return self._rms(self._output_squares)

    @property
    def input_rms(self) -> list[float]:
        """L+1 values: root mean square of what each read made, before its norm."""
        return self._rms(self._input_squares)

    @property
    def grad_rms(self) -> list[float]:
        """L values: root mean square of dL/dv_l; empty when no backward ran inside the recording."""
        return self._rms(self._grad_squares) if self._has_grads else []

    @property
    def routing(self) -> dict[str, Any] | None:
        """Mean weights over tokens, or None for a residual without weights.

        Rows have different lengths, since deeper reads have more sources; each row sums to one.
        `{"weights": L+1 rows, "sources": the names of each row's sources, "reads": L+1 names}`.
        """
        if any(weights is None for weights in self._weights):
            return None
        rows = [(weights / self.tokens).tolist() for weights in self._weights if weights is not None]
        return {"weights": rows, "sources": self._sources, "reads": read_names(self.num_sublayers)}


def _sum_of_squares(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float32).double().square().item()


@contextmanager
def record(model: nn.Module) -> Generator[Trace]:
    """Record what `model`'s residual does while the block runs; logits and gradients stay bit for bit the same.

    >>> with record(model) as trace:  # doctest: +SKIP
    ...     model(input_ids=ids)
    >>> trace.routing["weights"][-1]  # doctest: +SKIP

    Raises:
        ValueError: the model has no residual of this package, or is being recorded already.
    """
    residual = next((module for module in model.modules() if isinstance(module, Residual)), None)
    if residual is None:
        raise ValueError(f"{type(model).__name__} has no residual of attnres: build or load it with attnres.models")
    if residual.observer is not None:
        raise ValueError("this model is being recorded already: leave the first `record` block before a second")
    trace = Trace(residual.num_sublayers, residual.width)
    residual.observer = trace
    try:
        yield trace
    finally:
        residual.observer = None
