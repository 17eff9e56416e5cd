"""Rules that end each layer with a static sum of earlier layers' states: DenseFormer and ANCRe."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.weighting import weighted_sum
from attnres.residuals.settings import positive, start_at
from attnres.residuals.watch import NormLike


class Layers(NamedTuple):
    """The running stream, and the states of earlier layers that later sums use (the embedding first); all (..., d)."""

    stream: Tensor
    past: tuple[Tensor, ...]


class LayerSums(Residual):
    """A plain residual inside a layer (two sublayers); at its end `mixed` computes the stream for the next layer."""

    whole_layers = True

    def mixed(self, layers: Layers, layer: int) -> Layers:
        """Return the state after layer `layer`, whose plain result is `layers.stream`, (..., d) of any d."""
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

    def implied(self, read: int) -> Tensor:
        return self.weights_by_verbs(read)

    def hidden_state(self, state: Layers) -> Tensor:
        return state.stream

    def finish(self, state: Layers, norm: NormLike) -> Tensor:
        return self.normed(state.stream, self.num_sublayers, norm)


class DenseFormer(LayerSums):
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

    def mixed(self, layers: Layers, layer: int) -> Layers:
        past = (*layers.past, layers.stream)
        return Layers(weighted_sum(past, self.mix[layer].to(layers.stream)), past)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        layers = len(self.mix)
        unused = torch.ones(layers, layers + 1).triu(2).bool()
        mix = self.mix.float().cpu().masked_fill(unused, torch.nan)
        return {"mix": Learned(mix, ("layer", "source"), "coefficient of the embedding and each layer")}


class ANCRe(LayerSums):
    """After layer i (two sublayers): x_i = y_i + sum_{j < i} c_ij x_j,  c_i = softmax(p_i / t).

    x_0 is the embedding, and y_i the plain end of layer i, whose input was x_{i-1}: the layer's own shortcuts stay, as
    in the authors' language models, and the combination comes on top. `logits` p is (M, M) for M layers, row i uses its
    first i entries; p = 0 at the start: the mean of all earlier states, which is not the standard residual. t is 0.01.

    Source: Zhang et al., "ANCRe", arXiv 2602.09009, and the authors' code, github.com/zhangyilang/ANCRe.
    """

    name = "ancre"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About(
        "after each layer x_i = y_i + sum_j softmax_j(p_i / t) x_j over earlier layers' states",
        "p = 0, t = 0.01",
        "3 + L/4",
        "Zhang et al., arXiv 2602.09009",
    )

    def __init__(self, num_sublayers: int, width: int, *, temperature: float = 0.01) -> None:
        super().__init__(num_sublayers, width)
        self.temperature = positive("temperature", temperature)
        self.logits = nn.Parameter(torch.empty(num_sublayers // 2, num_sublayers // 2))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.logits)

    def coefficients(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Return c (layer + 1,) of layer `layer`, counted from 0."""
        return (self.logits[layer, : layer + 1].to(compute_dtype(dtype)) / self.temperature).softmax(0)

    def mixed(self, layers: Layers, layer: int) -> Layers:
        stream, past = layers
        stream = stream + weighted_sum(past, self.coefficients(layer, stream.dtype).to(stream))
        return Layers(stream, (*past, stream))

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        table = torch.full(self.logits.shape, torch.nan)  # without a row where one sublayer is half a layer
        for layer in range(len(table)):
            table[layer, : layer + 1] = self.coefficients(layer, torch.float32)
        return {"mix": Learned(table, ("layer", "source"), "coefficient of the embedding and each layer")}
