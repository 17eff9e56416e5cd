"""DenseFormer: after each layer a learned, static weighted sum of all layer outputs so far."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.residuals.base import NormLike, Residual, Slot
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.settings import full_precision, start_at


class Layers(NamedTuple):
    """The running stream, and what each layer gave so far (the embedding first); all (..., d)."""

    stream: Tensor
    past: tuple[Tensor, ...]


class DenseFormer(Residual):
    """After layer i (two sublayers): y_i = sum_{j <= i} a_ij x_j.

    x_0 is the embedding and x_j the output of layer j, whose input was y_{j-1}.

    `mix` is (M, M+1) for M layers; row i uses its first i+2 entries. It starts at [0 .. 0, 1]: a standard residual.

    Source: Pagliardini et al., "DenseFormer", arXiv 2402.02622 (dilation 1, period 1).
    """

    name = "denseformer"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, colour="#009e73")
    about = About(
        "after each layer x = sum_j a_ij x_j over its own outputs",
        "a = [0 .. 0, 1]",
        "3 + L/4",
        "Pagliardini et al., arXiv 2402.02622",
    )

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self.mix = nn.Parameter(torch.empty(num_sublayers // 2, num_sublayers // 2 + 1))
        self.init_parameters()

    def init_parameters(self) -> None:
        layers = self.num_sublayers // 2
        start_at(self.mix, torch.eye(layers + 1)[1:])

    def start(self, embedding: Tensor) -> Layers:
        return Layers(embedding, (embedding,))

    def read(self, state: Layers, index: int, norm: NormLike) -> tuple[Tensor, Layers]:
        return self.normed(state.stream, index, norm), state

    def write(self, state: Layers, index: int, output: Tensor) -> Layers:
        stream = state.stream + output
        if index % 2 == 0:
            return Layers(stream, state.past)
        past = (*state.past, stream)
        with full_precision(stream):
            row = self.mix[index // 2].to(stream.dtype)
            mixed = past[0] * row[0]
            for j in range(1, len(past)):
                mixed = torch.addcmul(mixed, past[j], row[j])
        return Layers(mixed, past)

    @torch.no_grad()
    def implied(self, index: int) -> Tensor:
        rows = torch.eye(self.num_sublayers + 1)
        stream, past = rows[0], [rows[0]]
        for sublayer in range(index):
            stream = stream + rows[sublayer + 1]
            if sublayer % 2:
                past.append(stream)
                stream = self.mix[sublayer // 2, : len(past)].float().cpu() @ torch.stack(past)
        return stream[: index + 1]

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        layers = len(self.mix)
        unused = torch.ones(layers, layers + 1).triu(2).bool()
        mix = self.mix.float().cpu().masked_fill(unused, torch.nan)
        return {"mix": Learned(mix, ("layer", "source"), "coefficient of the embedding and each layer")}

    def slots(self, index: int) -> tuple[Slot, ...]:
        past = [Slot("embedding", True), *(Slot(f"layer {i}", True) for i in range(index // 2))]
        return (*past, *([Slot(f"stream {index}", False)] if index else []))

    def pack(self, state: Layers, index: int) -> tuple[Tensor, ...]:
        return (*state.past, *([state.stream] if index else []))

    def unpack(self, tensors: Sequence[Tensor], index: int) -> Layers:
        past = tuple(tensors[: 1 + index // 2])
        return Layers(tensors[-1], past)

    def hidden_state(self, state: Layers) -> Tensor:
        return state.stream

    def finish(self, state: Layers, norm: NormLike) -> Tensor:
        return self.normed(state.stream, self.num_sublayers, norm)
