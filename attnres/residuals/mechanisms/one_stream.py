"""Bases of rules with one running stream, whose write is a weighted sum of stream and output."""

import torch
from torch import Tensor

from attnres.residuals.base import Residual
from attnres.residuals.state import State
from attnres.residuals.watch import NormLike


class OneStream(Residual):
    """The state is the stream x, (..., d). A subclass defines `write`; reads and the head take N(x)."""

    def start(self, embedding: Tensor) -> State:
        return embedding

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        return self.normed(state, index, norm), state

    def hidden_state(self, state: State) -> Tensor:
        return state

    def finish(self, state: State, norm: NormLike) -> Tensor:
        return self.normed(state, self.num_sublayers, norm)


class ScalarMix(OneStream):
    """x_{l+1} = a_l x_l + b_l f_l. In terms of sources, h_l = sum_i (b_i prod_{i < j < l} a_j) v_i."""

    def shortcut(self, index: int) -> Tensor | float | None:
        """Return a of sublayer `index`, a number; None is one."""
        return None

    def branch(self, index: int) -> Tensor | float:
        """Return b of sublayer `index`, a number."""
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        shortcut = self.shortcut(index)
        kept = state if shortcut is None else state * shortcut
        return kept + output.to(state.dtype) * self.branch(index)

    @torch.no_grad()
    def implied(self, read: int) -> Tensor | None:
        weights = [1.0]
        for sublayer in range(read):
            shortcut = self.shortcut(sublayer)
            factor = 1.0 if shortcut is None else float(shortcut)
            weights = [weight * factor for weight in weights]
            weights.append(float(self.branch(sublayer)))
        return torch.tensor(weights)
