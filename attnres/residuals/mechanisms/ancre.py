"""ANCRe: each layer's end takes a learned convex combination of all earlier layers' states."""

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype
from attnres.residuals.arithmetic import weighted_sum
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.layers import Layers, LayerSums
from attnres.residuals.settings import positive


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

    def in_past(self, index: int) -> bool:
        return index % 2 == 0

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        layers = len(self.logits)
        table = torch.full((layers, layers), torch.nan)
        for layer in range(layers):
            table[layer, : layer + 1] = self.coefficients(layer, torch.float32).cpu()
        return {"mix": Learned(table, ("layer", "source"), "coefficient of the embedding and each layer")}
