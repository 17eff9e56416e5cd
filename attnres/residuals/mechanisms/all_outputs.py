"""What rules share that keep the embedding and every output apart: their state, and how a stage hands it on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.residuals.base import NormLike, Residual, Slot, slots_of
from attnres.residuals.layout import outputs


class AllOutputs(Residual):
    """The state is the embedding and every output, each (..., d). A rule says what `read` makes of them."""

    def start(self, embedding: Tensor) -> tuple[Tensor, ...]:
        return (embedding,)

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError

    def write(self, state: tuple[Tensor, ...], index: int, output: Tensor) -> tuple[Tensor, ...]:
        return (*state, output)

    def finish(self, state: tuple[Tensor, ...], norm: NormLike) -> Tensor:
        return self.read(state, self.num_sublayers, norm)[0]

    def hidden_state(self, state: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(state).sum(0)

    def slots(self, index: int) -> tuple[Slot, ...]:
        return slots_of(outputs(index + 1, self.sublayers), index)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
        return tuple(tensors)
