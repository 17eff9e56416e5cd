"""CompleteP's branch factor against its formula."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("base_layers", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_divided_by_depth(shape, base_layers):
    def formula(network, parameters):
        multiplier = (network.sublayers / 2) / base_layers
        x = network.embedding
        for index in range(network.sublayers):
            x = x + multiplier**-1 * network.f(index, network.norm(index, x))
        return network.norm(network.sublayers, x)

    check_formula("completep", formula, shape, base_layers=base_layers)


def test_it_is_a_control_that_learns_nothing():
    residual = make_residual("completep", 8, 8)
    assert residual.traits.is_control and not list(residual.parameters())
    assert torch.equal(residual.implied(2), torch.tensor([1.0, 0.25, 0.25]))
    with pytest.raises(UserError, match="base_layers is 0"):
        make_residual("completep", 8, 8, base_layers=0)
