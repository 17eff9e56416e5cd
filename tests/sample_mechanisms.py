"""Mechanisms that tests share, and the names of those of a kind."""

import pytest
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


REPRESENTATIVES = (
    "standard",
    "postnorm",
    "hybrid_norm",
    "denseformer",
    "block",
    "full",
    "boundary",
    "hyper_connections",
    "muddformer",
    "ddl",
    "laurel",
    "adaptive",
)
"""One mechanism of each shape: the running sum, a norm of it, two norms in turn, learned weights, depth attention to
blocks, to all outputs and at block ends alone, several streams, mixtures for queries, keys and values,
a stream that is erased and written, weights in the residual connection, and learned block boundaries."""


def crossed(names=RESIDUALS):
    """Return these names for `parametrize`: of the representatives in `make test`, of the others in `make test-all`."""
    assert set(REPRESENTATIVES) <= set(RESIDUALS)
    return [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.long) for name in sorted(names)]


WEIGHED = sorted(name for name in RESIDUALS if make_residual(name, 6, 32).layout()[0].sources)
"""Names of the mechanisms whose reads are weighted sums of sources."""
LINEAR = sorted(name for name in WEIGHED if make_residual(name, 6, 32).traits.linear)
"""Names of those that have a mixing matrix."""
