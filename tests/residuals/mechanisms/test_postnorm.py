"""Post-norm against its formula: the norm comes after the addition."""

import pytest
from formula import SHAPES, check_formula


@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_of_the_sum_is_the_new_stream(shape):
    def formula(network, parameters):
        x = network.norm(0, network.embedding)
        for index in range(network.sublayers):
            x = network.norm(index + 1, x + network.f(index, x))
        return x

    check_formula("postnorm", formula, shape)
