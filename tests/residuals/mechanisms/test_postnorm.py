"""Post-norm and DeepNorm against their formulas, and DeepNorm's start values."""

import pytest
from formula import SHAPES, check_formula

from attnres import make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_of_the_sum_is_the_new_stream(shape):
    def formula(network, parameters):
        x = network.norm(0, network.embedding)
        for index in range(network.sublayers):
            x = network.norm(index + 1, x + network.f(index, x))
        return x

    check_formula("postnorm", formula, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stream_is_scaled_up_before_each_norm(shape):
    def formula(network, parameters):
        layers = network.sublayers / 2
        x = network.norm(0, network.embedding)
        for index in range(network.sublayers):
            x = network.norm(index + 1, (2 * layers) ** 0.25 * x + network.f(index, x))
        return x

    check_formula("deepnorm", formula, shape)


def test_branches_start_smaller_with_depth():
    layers = 6
    assert make_residual("deepnorm", 2 * layers, 8).branch_scale() == pytest.approx((8 * layers) ** -0.25)
    assert make_residual("postnorm", 2 * layers, 8).branch_scale() == 1.0
