"""The norm-preserving mix: stream and branch weighed so that the squares of their weights sum to one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.one_stream import ScalarMix


class NormPreserving(ScalarMix):
    """x_{l+1} = sqrt(1 - b/M) x_l + sqrt(b/M) f_l(N x_l), b = softplus(t) for M layers.

    Stream and output of one length and at right angles give a stream of that length. t is one learned number a layer,
    for both of its sublayers, which starts at 0 (b = log 2); b stays below M.

    Costs one parameter a layer.

    Source: marin, issue 8860 (github.com/marin-community/marin), experiments/grug/moe_norm_preserving_residual.
    """

    name = "norm_preserving"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About("sqrt(1 - b/M) x + sqrt(b/M) f(N x), M layers", "b = log 2", "3", "marin-community/marin, issue 8860")

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self.layers = -(-num_sublayers // len(self.sublayers))
        self.theta = nn.Parameter(torch.empty(self.layers))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.theta)

    def share(self) -> Tensor:
        """Return b/M of each layer, (M,)."""
        return (F.softplus(self.theta) / self.layers).clamp_max(0.999)

    def shortcut(self, index: int) -> Tensor:
        return (1.0 - self.share()[index // len(self.sublayers)]).sqrt()

    def branch(self, index: int) -> Tensor:
        return self.share()[index // len(self.sublayers)].sqrt()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        return {"share": Learned(self.share().float().cpu(), ("layer",), "b/M, the square of an output's weight")}
