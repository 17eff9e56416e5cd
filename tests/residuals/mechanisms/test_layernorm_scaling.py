"""LayerNorm scaling against its formula: depth counts layers."""

import pytest
from formula import SHAPES, check_formula


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layers_norms_are_divided_by_the_root_of_its_number(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            layer = index // 2 + 1
            x = x + network.f(index, network.norm(index, x) / layer**0.5)
        return network.norm(network.sublayers, x)

    check_formula("layernorm_scaling", formula, shape)
