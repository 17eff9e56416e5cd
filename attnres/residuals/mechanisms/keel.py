"""KEEL: a post-norm whose shortcut is scaled by depth and whose branches keep their pre-norm."""

import torch
from torch import Tensor, nn

from attnres.ops import Norm, apply_norm
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.settings import positive
from attnres.residuals.watch import NormLike


class Keel(OneStream):
    """x_{l+1} = P_l(a x_l + f_l(N x_l)), a = L, the number of sublayers; x + f(N x) in the first layer.

    P_l is an RMSNorm with a gain that starts at 1 and `eps`: the residual's own, besides the decoder's norms N, of
    which the last follows the last P.

    State: what the next P will be given, then (after the read) its output, which is the new stream; (..., d).

    Args:
        alpha: a in place of L; the authors choose it freely, above 1, in networks that are not deep.

    Costs d parameters a sublayer.

    Source: Chen and Wei, "Post-LayerNorm Is Back", arXiv 2601.19895, equation 8 and section 3.1.
    """

    name = "keel"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About("P(L x + f(N x)), L sublayers, P a norm", "gains 1", "3", "Chen and Wei, arXiv 2601.19895")

    def __init__(self, num_sublayers: int, width: int, *, alpha: float | None = None, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        self.alpha = float(num_sublayers) if alpha is None else positive("alpha", alpha)
        self.eps = positive("eps", eps)
        self.first = len(self.sublayers)
        self.gain = nn.Parameter(torch.empty(max(0, num_sublayers - self.first), width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def stream(self, state: Tensor, index: int) -> Tensor:
        """Return x before sublayer `index` (L: the head)."""
        if index <= self.first:
            return state
        return apply_norm(state, Norm(self.gain[index - 1 - self.first], eps=self.eps))

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        return super().read(self.stream(state, index), index, norm)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.add(output, state, alpha=self.alpha if index >= self.first else 1.0)

    def finish(self, state: Tensor, norm: NormLike) -> Tensor:
        return super().finish(self.stream(state, self.num_sublayers), norm)
