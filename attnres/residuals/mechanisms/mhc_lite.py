"""mHC-lite: streams mixed by a convex combination of permutations."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres.errors import UserError
from attnres.residuals.layout import About
from attnres.residuals.mechanisms.mhc import MHC
from attnres.residuals.settings import whole

MOST_STREAMS = 5
"""There are n! permutations of n streams: 120 of five, 720 of six."""


class MHCLite(MHC):
    """As `mhc`, with A = sum_k r_k P_k over the n! permutations P_k of n streams, r = softmax(static_carry + s_r R).

    Doubly stochastic exactly, with no iteration. The logits of r start at 0 for the identity, which comes first, and at
    -8 for the others: its weight is then .992 for n = 4. Parameters of a sublayer: (n! + 2n)(n d + 1) + n d + 3.

    Source: Yang and Gao, "mHC-lite", arXiv 2601.05732; start values of github.com/FFTYYY/mhc-lite.
    """

    name = "mhc_lite"
    about = About(
        "as mhc, A = sum_k softmax(r)_k P_k over all permutations of n streams",
        "as mhc; r = 0 for the identity, else -8",
        "8n + 2",
        "Yang and Gao, arXiv 2601.05732",
    )

    def __init__(self, num_sublayers: int, width: int, *, num_streams: int = 4, eps: float = 1e-6) -> None:
        if whole("num_streams", num_streams) > MOST_STREAMS:
            raise UserError(
                f"num_streams is {num_streams}: mhc_lite weighs all n! permutations of n streams, which are too many; "
                f"expected at most {MOST_STREAMS}, or choose mhc"
            )
        super().__init__(num_sublayers, width, num_streams=num_streams, eps=eps)
        orders = torch.tensor(list(itertools.permutations(range(num_streams))), device="cpu")
        self.permutations = F.one_hot(orders, num_streams).flatten(1).float()  # (n!, n^2), no parameter

    def carry_size(self) -> int:
        return math.factorial(self.num_streams)

    def first_carry(self) -> Tensor:
        return -8.0 * (torch.arange(self.carry_size()) > 0)

    def carry(self, logits: Tensor) -> Tensor:
        n = self.num_streams
        return (logits.softmax(-1) @ self.permutations.to(logits)).unflatten(-1, (n, n))
