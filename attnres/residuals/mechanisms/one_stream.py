"""Bases of rules with one running stream: what a sublayer writes is a weighed sum of stream and output."""

import torch
from torch import Tensor

from attnres.residuals.base import Residual
from attnres.residuals.state import State
from attnres.residuals.watch import NormLike, looking


class OneStream(Residual):
    """The state is the stream x, (..., d). A rule says what `write` makes of it; reads and the head take N(x)."""

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
    def implied(self, index: int) -> Tensor | None:
        weights = [1.0]
        for sublayer in range(index):
            shortcut = self.shortcut(sublayer)
            factor = 1.0 if shortcut is None else float(shortcut)
            weights = [weight * factor for weight in weights]
            weights.append(float(self.branch(sublayer)))
        return torch.tensor(weights)


class TokenMix(OneStream):
    """x_{l+1} = a x_l + b f_l, numbers a and b of each token. In terms of sources, h_l = sum_i (b_i prod a_j) v_i.

    The weights of the coming read are kept beside the state and by index, while someone watches: looking changes no
    state, and a layer that runs again finds what it found.
    """

    watched_from_start = True

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self._weights: dict[int, Tensor] = {}

    def forget(self) -> None:
        self._weights = {}

    def start(self, embedding: Tensor) -> Tensor:
        self._weights = {0: embedding.new_ones(*embedding.shape[:-1], 1)} if self.watched else {}
        return embedding

    def follow(self, index: int, shortcut: Tensor | float, branch: Tensor) -> None:
        """Keep what the read after sublayer `index` is made of, if someone watches: a and b are (..., 1)."""
        if self.watched and self.traits.linear:
            with looking(self):
                self._weights[index + 1] = torch.cat([self._weights[index].to(branch) * shortcut, branch], -1)

    def weights(self, index: int) -> Tensor | None:
        """Return the weights (tokens, index + 1) of read `index`, if someone watches and there are such weights."""
        return self._weights[index].reshape(-1, index + 1) if self.watched and self.traits.linear else None

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, State]:
        return self.normed(state, index, norm, self.weights(index)), state

    def finish(self, state: Tensor, norm: NormLike) -> Tensor:
        return self.normed(state, self.num_sublayers, norm, self.weights(self.num_sublayers))
