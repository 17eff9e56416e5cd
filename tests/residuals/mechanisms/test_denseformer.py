"""DenseFormer against the formula of arXiv 2402.02622."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_each_layer_ends_with_a_sum_of_layer_outputs(shape):
    def formula(network, p):
        past, x = [network.embedding], network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x))
            if index % 2:
                past.append(x)
                x = sum(p["mix"][index // 2, j] * output for j, output in enumerate(past))
        return network.norm(network.sublayers, x)

    check_formula("denseformer", formula, shape)


def test_the_start_is_each_layers_own_output():
    assert torch.equal(make_residual("denseformer", 7, 8).mix, torch.eye(4)[1:])
