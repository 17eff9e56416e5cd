"""ReZero: every branch starts switched off, by one learned number."""

import torch
from torch import Tensor, nn

from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.one_stream import ScalarMix
from attnres.residuals.settings import true_or_false
from attnres.residuals.state import as_it_is
from attnres.residuals.watch import NormLike


class ReZero(ScalarMix):
    """x_{l+1} = x_l + a_l f_l(N x_l), a learned number a_l for each sublayer that starts at 0.

    The head first reads the embedding alone, so that this is not the standard residual at the start.

    Args:
        prenorm: whether sublayers read N x. The publication's networks have no norms: false gives x + a f(x), in which
            a decoder's own pre-norms go unused, so that their gains have no gradient (DDP refuses such parameters).

    Costs one parameter a sublayer.

    Source: Bachlechner et al., "ReZero is All You Need", arXiv 2003.04887.
    """

    name = "rezero"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About("x + a f(N x), a number a", "a = 0", "3", "Bachlechner et al., arXiv 2003.04887")

    def __init__(self, num_sublayers: int, width: int, *, prenorm: bool = True) -> None:
        super().__init__(num_sublayers, width)
        self.prenorm = true_or_false("prenorm", prenorm)
        self.scale = nn.Parameter(torch.empty(num_sublayers))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        return super().read(state, index, norm if self.prenorm else as_it_is)

    def branch(self, index: int) -> Tensor:
        return self.scale[index]

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        return {"scale": Learned(self.scale.float().cpu(), ("sublayer",), "a, the factor of each output")}
