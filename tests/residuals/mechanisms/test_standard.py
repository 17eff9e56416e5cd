"""The baseline and its control against their formulas."""

import pytest
import torch
from formula import SHAPES, check_formula


@pytest.mark.parametrize("shape", SHAPES)
def test_standard_is_prenorm(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x))
        return network.norm(network.sublayers, x)

    check_formula("standard", formula, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_rescaled_is_the_mean_of_all_outputs_so_far(shape):
    def formula(network, parameters):
        outputs = [network.embedding]
        for index in range(network.sublayers):
            outputs.append(network.f(index, network.norm(index, torch.stack(outputs).mean(0))))
        return network.norm(network.sublayers, torch.stack(outputs).mean(0))

    check_formula("rescaled", formula, shape)
