"""The norm-preserving mix against its formula."""

import math

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_the_squares_of_both_weights_sum_to_one(shape):
    def formula(network, parameters):
        layers = math.ceil(network.sublayers / 2)
        x = network.embedding
        for index in range(network.sublayers):
            beta = torch.log(1 + torch.exp(parameters["theta"][index // 2]))
            f = network.f(index, network.norm(index, x))
            x = torch.sqrt(1 - beta / layers) * x + torch.sqrt(beta / layers) * f
        return network.norm(network.sublayers, x)

    check_formula("norm_preserving", formula, shape)


def test_it_starts_at_log_two_and_stays_below_its_bound():
    residual = make_residual("norm_preserving", 12, 8)
    torch.testing.assert_close(residual.share(), torch.full((6,), math.log(2) / 6))
    with torch.no_grad():
        residual.theta.fill_(1e4)
    assert bool((residual.share() < 1).all()) and bool(residual.implied(12).isfinite().all())
