"""Peri-LN: a norm before and after every sublayer."""

import torch
from torch import Tensor, nn

from attnres.ops import Norm, apply_norm
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.settings import positive


class PeriLN(OneStream):
    """x_{l+1} = x_l + P_l(f_l(N x_l)): each output is normed before it is added.

    P_l is an RMSNorm with a gain that starts at 1 and `eps`: the residual's own, besides the decoder's norms. The
    publication's norm of the embedding, which it calls optional, is not here.

    A gain is one number a channel: reads are no sums of outputs with one number each.

    Costs d parameters a sublayer.

    Source: Kim et al., "Peri-LN", arXiv 2502.02732.
    """

    name = "peri_ln"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About("x + P(f(N x)), P a norm", "gains 1", "3", "Kim et al., arXiv 2502.02732")

    def __init__(self, num_sublayers: int, width: int, *, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        self.eps = positive("eps", eps)
        self.gain = nn.Parameter(torch.empty(num_sublayers, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return state + apply_norm(output, Norm(self.gain[index], eps=self.eps, out_dtype=state.dtype))
