"""LayerNorm scaling: deeper layers get smaller inputs."""

from torch import Tensor

from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.standard import Standard
from attnres.residuals.watch import NormLike


class LayerNormScaling(Standard):
    """x_{l+1} = x_l + f_l(N(x_l) / sqrt(k)) in layer k = 1 .. M: both of a layer's norms are divided by the square root
    of the layer's number, the head's norm by nothing.

    Depth counts layers, not sublayers, as in the publication's code. Scaled start values (output weights drawn smaller
    with depth) work against it, the authors say: a model that is built with it has none, GPT-2 too.

    Costs no parameters.

    Source: Sun et al., "The Curse of Depth in Large Language Models", arXiv 2502.05795.
    """

    name = "layernorm_scaling"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    even_start = True
    about = About("x + f(N x / sqrt(k)), layer k", "nothing", "3", "Sun et al., arXiv 2502.05795")

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        x, state = super().read(state, index, norm)
        return x * (1 + index // len(self.sublayers)) ** -0.5, state
