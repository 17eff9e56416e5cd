"""KEEL against its formula, the first layer without its post-norm and scaling."""

import pytest
import torch
from formula import SHAPES, check_formula
from torch.nn import functional as F

from attnres import UserError, make_residual


@pytest.mark.parametrize("alpha", [None, 2.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scaled_stream_and_the_normed_branch_are_normed_together(shape, alpha):
    def formula(network, parameters):
        gains, factor = parameters["gain"], network.sublayers if alpha is None else alpha
        x = network.embedding
        for index in range(network.sublayers):
            f = network.f(index, network.norm(index, x))
            if index < 2:
                x = x + f
            else:
                x = F.rms_norm(factor * x + f, (network.width,), gains[index - 2], 1e-5)
        return network.norm(network.sublayers, x)

    check_formula("keel", formula, shape, alpha=alpha, eps=1e-5)


def test_gains_start_at_one_and_the_first_layer_has_none():
    residual = make_residual("keel", 7, 8)
    assert torch.equal(residual.gain, torch.ones(5, 8)) and residual.alpha == 7.0
    assert make_residual("keel", 1, 8).gain.numel() == 0


def test_a_factor_that_is_no_factor_is_refused():
    with pytest.raises(UserError, match="alpha is 0: expected a positive number"):
        make_residual("keel", 4, 8, alpha=0)
