"""DenseFormer: after each layer a learned, static weighted sum of all layer outputs so far."""

import torch
from torch import nn

from attnres.residuals.arithmetic import weighted_sum
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.layers import Layers, LayerSums
from attnres.residuals.settings import start_at


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
