"""A network of MLPs alone, connected by any mechanism: small enough to ask one thing of it many times."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.residuals import make_residual

EPS = 1e-12


def normed(h: Tensor) -> Tensor:
    """RMSNorm without a gain."""
    return F.rms_norm(h, (h.shape[-1],), eps=EPS)


class Mlps(nn.Module):
    """L sublayers W2 relu(W1 x) of width d, connected by a mechanism; with `norm`, every read ends with one.

    Args:
        settings: of the mechanism. generator: what the weights are drawn from (normal, by fan-in).
    """

    def __init__(
        self, residual: str, layers: int, width: int, *, norm: bool, generator: torch.Generator, **settings: Any
    ) -> None:
        super().__init__()

        def matrix() -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, width, width, generator=generator) / math.sqrt(width))

        self.first, self.second = matrix(), matrix()
        self.residual: Any = make_residual(residual, layers, width, **settings)
        self.norm = norm
        self.reads: list[float] = []
        self.streams: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d). Without gradients `reads` and `streams` then hold the RMS of each read before its norm,
        and of the state as one vector after each write."""
        self.reads, self.streams = [], []
        state = self.residual("start", x)
        for index, (first, second) in enumerate(zip(self.first, self.second, strict=True)):  # one stack in backward
            read, state = self.residual("read", state, index, self._norm)
            output = F.relu(read @ first) @ second
            state = self.residual("write", state, index, output)
            if not torch.is_grad_enabled():
                self.streams.append(_rms(self.residual.hidden_state(state)))
        return self.residual("finish", state, self._norm)

    def _norm(self, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.reads.append(_rms(h))
        return normed(h) if self.norm else h


def _rms(h: Tensor) -> float:
    return float(h.detach().double().square().mean().sqrt())
