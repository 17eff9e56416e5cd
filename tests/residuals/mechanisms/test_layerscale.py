"""LayerScale against its formula, and its published start values."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_each_channel_of_an_output_has_a_factor(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x)) @ torch.diag(parameters["scale"][index])
        return network.norm(network.sublayers, x)

    check_formula("layerscale", formula, shape)


@pytest.mark.parametrize(("layers", "start"), [(12, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6), (48, 1e-6)])
def test_factors_start_smaller_in_deeper_networks(layers, start):
    assert torch.equal(make_residual("layerscale", 2 * layers, 8).scale, torch.full((2 * layers, 8), start))
    assert torch.equal(
        make_residual("layerscale", 2 * layers, 8, scale_init=0.5).scale, torch.full((2 * layers, 8), 0.5)
    )


def test_a_start_of_nothing_is_refused():
    with pytest.raises(UserError, match="scale_init is 0: expected a positive number"):
        make_residual("layerscale", 4, 8, scale_init=0)
