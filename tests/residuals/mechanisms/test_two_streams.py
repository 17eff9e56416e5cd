"""Rules of two streams, each against its formula."""

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


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_reads_lane_0_and_the_mlp_lane_1(shape):
    def formula(network, p):
        lane0 = lane1 = network.embedding
        for index in range(network.sublayers):
            out = network.f(index, network.norm(index, lane0 if index % 2 == 0 else lane1))
            lane0 = p["carry"][index] * lane0 + p["write_share"][index, 0] * out
            lane1 = p["carry"][index] * lane1 + p["write_share"][index, 1] * out
        return network.norm(network.sublayers, (lane0 + lane1) * 0.5)

    check_formula("parallel_lanes", formula, shape)


def test_start_values_are_the_published_ones():
    residual = make_residual("parallel_lanes", 3, 8)
    assert residual.carry.tolist() == [pytest.approx(1.1**0.5)] * 3
    assert residual.write_share.tolist() == [[1.0, 1.5], [1.0, 1.0], [1.0, 1.5]]


def test_of_three_sublayers_a_layer_the_mlp_alone_reads_lane_1():
    residual = make_residual("parallel_lanes", 3, 8, sublayers=("attention", "cross", "mlp"))
    assert residual.write_share.tolist() == [[1.0, 1.5], [1.0, 1.5], [1.0, 1.0]]
    state = residual.start(torch.ones(8))
    for index, expected in enumerate([1.0, 1.1**0.5 + 1.0, 1.1 + 1.5 * 1.1**0.5 + 1.5]):
        h, state = residual.read(state, index, lambda h: h)
        assert h.tolist() == [pytest.approx(expected)] * 8
        state = residual.write(state, index, torch.ones(8))
