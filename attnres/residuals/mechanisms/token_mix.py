"""What rules share whose stream and branch get one number of each token: those who watch see the reads' weights."""

import torch
from torch import Tensor

from attnres.residuals.base import NormLike, State
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.watch import looking


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
