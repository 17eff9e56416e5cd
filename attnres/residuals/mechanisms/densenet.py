"""DenseNet-style: every read is a learned projection of all earlier outputs, concatenated."""

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype
from attnres.residuals.base import NormLike
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.all_outputs import AllOutputs
from attnres.residuals.settings import start_at


class DenseNet(AllOutputs):
    """h_l = [v_0 .. v_l] W_l, W_l ((l+1) d, d): a matrix (d, d) for each source of each read; h_0 = v_0.

    `projection` is (L (L+3) / 2, d, d): the matrices of reads 1 to L, the output's, one after another. They start as
    identities, which makes the standard residual (a DenseNet draws them; for transformers no start is published). The
    parameters are d^2 L (L+3) / 2 and so are the multiplications a token: more than the rest of most transformers.
    Products run in the precision of the network's own (autocast), their sums in fp32.

    Source: Huang et al., "Densely Connected Convolutional Networks", arXiv 1608.06993, as a transformer's residual.
    """

    name = "densenet"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, linear=False)
    about = About(
        "h_l = [v_0 .. v_l] W_l, W_l ((l+1) d, d)", "W_l = [I .. I]", "L/2 + 2", "Huang et al., arXiv 1608.06993"
    )

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self.projection = nn.Parameter(torch.empty(self.first_matrix(num_sublayers + 1), width, width))
        self.init_parameters()

    def first_matrix(self, index: int) -> int:
        """Return how many matrices the reads before `index` have: 2, 3 .. index of them."""
        return index * (index + 1) // 2 - 1

    def init_parameters(self) -> None:
        start_at(self.projection, torch.eye(self.width).expand_as(self.projection))

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        h = state[0]
        if index > 0:
            first = self.first_matrix(index)
            matrices = self.projection[first : first + index + 1]
            total = (state[0] @ matrices[0].to(h.dtype)).to(compute_dtype(h.dtype))
            for i in range(1, index + 1):
                total = total + state[i] @ matrices[i].to(state[i].dtype)
            h = total.to(h.dtype)
        return self.normed(h, index, norm), state
