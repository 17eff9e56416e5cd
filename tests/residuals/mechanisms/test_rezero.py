"""ReZero against its formula, with the decoder's pre-norms and without."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_output_has_a_factor(shape, prenorm):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            f = network.f(index, network.norm(index, x) if prenorm else x)
            x = x + parameters["scale"][index] * f
        return network.norm(network.sublayers, x)

    check_formula("rezero", formula, shape, prenorm=prenorm)


def test_factors_start_at_zero_and_are_the_weights_of_reads():
    residual = make_residual("rezero", 6, 8)
    assert torch.equal(residual.scale, torch.zeros(6))
    assert torch.equal(residual.implied(3), torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_a_setting_that_is_no_truth_value():
    with pytest.raises(UserError, match="prenorm is 1: expected true or false"):
        make_residual("rezero", 4, 8, prenorm=1)
