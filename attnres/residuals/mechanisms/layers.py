"""What rules share that end each layer with a static sum of earlier layers' states."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres.ops import full_precision
from attnres.residuals.base import NormLike, Residual, Slot


class Layers(NamedTuple):
    """The running stream, and the states of earlier layers that later sums take (the embedding first); all (..., d)."""

    stream: Tensor
    past: tuple[Tensor, ...]


class LayerSums(Residual):
    """Inside a layer (two sublayers) a plain residual; at its end `mixed` makes the stream that the next one begins
    with."""

    whole_layers = True

    def mixed(self, layers: Layers, layer: int) -> Layers:
        """Return the state behind layer `layer`, whose plain end is `layers.stream`, (..., d) of any d."""
        raise NotImplementedError

    def start(self, embedding: Tensor) -> Layers:
        return Layers(embedding, (embedding,))

    def read(self, state: Layers, index: int, norm: NormLike) -> tuple[Tensor, Layers]:
        return self.normed(state.stream, index, norm), state

    def write(self, state: Layers, index: int, output: Tensor) -> Layers:
        state = state._replace(stream=state.stream + output)
        if index % 2 == 0:
            return state
        with full_precision(output):
            return self.mixed(state, index // 2)

    @torch.no_grad()
    def implied(self, index: int) -> Tensor:
        rows = torch.eye(self.num_sublayers + 1)
        state = self.start(rows[0])
        for sublayer in range(index):
            state = self.write(state, sublayer, rows[sublayer + 1])
        return state.stream[: index + 1]

    def in_past(self, index: int) -> bool:
        """Whether the stream before sublayer `index` is the last of the past."""
        return index == 0

    def slots(self, index: int) -> tuple[Slot, ...]:
        past = [Slot("embedding", True), *(Slot(f"layer {i}", True) for i in range(index // 2))]
        return (*past, *([] if self.in_past(index) else [Slot(f"stream {index}", False)]))

    def pack(self, state: Layers, index: int) -> tuple[Tensor, ...]:
        return state.past if self.in_past(index) else (*state.past, state.stream)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> Layers:
        return Layers(tensors[-1], tuple(tensors[: 1 + index // 2]))

    def hidden_state(self, state: Layers) -> Tensor:
        return state.stream

    def finish(self, state: Layers, norm: NormLike) -> Tensor:
        return self.normed(state.stream, self.num_sublayers, norm)
