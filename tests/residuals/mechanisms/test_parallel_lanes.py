"""Parallel lanes against the code of modded-nanogpt's pull request 230."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import make_residual


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
