"""HybridNorm's residual against its formula, with the decoder's pre-norm in place of the norms of q, k and v."""

import pytest
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("prenorm_layers", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_before_an_mlp_is_its_stream(shape, prenorm_layers):
    def formula(network, parameters):
        x = network.embedding
        for attention in range(0, network.sublayers, 2):
            mlp = attention + 1
            y = x + network.f(attention, network.norm(attention, x))
            if mlp == network.sublayers:
                x = y
            elif attention // 2 < prenorm_layers:
                x = y + network.f(mlp, network.norm(mlp, y))
            else:
                x = network.norm(mlp, y) + network.f(mlp, network.norm(mlp, y))
        return network.norm(network.sublayers, x)

    check_formula("hybrid_norm", formula, shape, prenorm_layers=prenorm_layers)


def test_every_layer_may_be_prenorm():
    residual = make_residual("hybrid_norm", 4, 8, prenorm_layers=9)
    assert residual.prenorm_layers == 9
    with pytest.raises(UserError, match="prenorm_layers is -1: expected a whole number, at least 0"):
        make_residual("hybrid_norm", 4, 8, prenorm_layers=-1)
