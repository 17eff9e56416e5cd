"""SiameseNorm against its formula: two streams, one sublayer."""

import pytest
import torch
from formula import SHAPES, check_formula
from torch.nn import functional as F

from attnres import make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_both_streams_feed_each_sublayer_and_take_its_output(shape):
    def formula(network, parameters):
        def norm(name, index, h):
            return F.rms_norm(h, (network.width,), parameters[name][index], 1e-5)

        x = y = network.embedding
        for index in range(network.sublayers):
            c = (2 * (index // 2 + 1)) ** 0.5
            x = norm("post_gain", index, x)
            z = network.f(index, network.norm(index, x + norm("pre_gain", index, y)))
            x, y = x + z / c, y + z
        last = network.sublayers
        return network.norm(last, norm("post_gain", last, x) + norm("pre_gain", last, y))

    check_formula("siamese_norm", formula, shape, eps=1e-5)


def test_gains_start_at_one_and_the_hidden_state_is_the_running_sum():
    residual = make_residual("siamese_norm", 4, 8)
    assert torch.equal(residual.pre_gain, torch.ones(5, 8)) and torch.equal(residual.post_gain, torch.ones(5, 8))
    embedding, output = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    _, state = residual.read(residual.start(embedding), 0, lambda h: h)
    assert torch.equal(residual.hidden_state(residual.write(state, 0, output)), embedding + output)
