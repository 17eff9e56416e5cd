"""Mechanisms that tests share, and the names of those of a kind."""

import torch
from torch import nn

from attnres import RESIDUALS, make_residual
from attnres.residuals.mechanisms.standard import Standard


class Scaled(Standard):
    """h_l = a_l sum_{i<l} v_i."""

    def __init__(self, num_sublayers, width):
        super().__init__(num_sublayers, width)
        self.scale = nn.Parameter(torch.empty(num_sublayers + 1))
        self.init_parameters()

    def init_parameters(self):
        nn.init.ones_(self.scale)

    def normed(self, h, index, norm, weights=None, values=()):
        return super().normed(h * self.scale[index].to(h.dtype), index, norm, weights, values)

    def implied(self, index):
        return self.scale[index].detach().expand(index + 1)


WEIGHED = sorted(name for name in RESIDUALS if make_residual(name, 6, 32).layout()[0].sources)
"""Names of the mechanisms whose reads are weighted sums of sources."""
LINEAR = sorted(name for name in WEIGHED if make_residual(name, 6, 32).traits.linear)
"""Names of those that have a mixing matrix."""
