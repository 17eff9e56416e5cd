"""DenseFormer and ANCRe against the formulas of arXiv 2402.02622 and 2602.09009."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


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


@pytest.mark.parametrize("temperature", [0.01, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_layer_ends_with_a_convex_combination_of_earlier_states_on_top(shape, temperature):
    def formula(network, p):
        states = [network.embedding]
        x = network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x))
            if index % 2:
                logits = p["logits"][index // 2, : len(states)] / temperature
                c = torch.exp(logits) / torch.exp(logits).sum()
                x = x + torch.tensordot(c, torch.stack(states), 1)
                states.append(x)
        return network.norm(network.sublayers, x)

    check_formula("ancre", formula, shape, temperature=temperature)


def test_the_start_is_the_mean_of_earlier_states():
    residual = make_residual("ancre", 6, 8)
    assert residual.temperature == 0.01 and not residual.logits.any()
    x0, y1, y2 = torch.eye(8)[:3]
    state = residual.start(x0)
    for index, output in enumerate((y1, torch.zeros(8), y2)):
        state = residual.write(state, index, output)
    assert torch.equal(state.stream, 2 * x0 + y1 + y2)
    state = residual.write(state, 3, torch.zeros(8))
    assert torch.equal(state.stream, 2 * x0 + y1 + y2 + (x0 + (2 * x0 + y1)) / 2)
    assert residual.implied(4).tolist() == [3.5, 1.5, 1.5, 1.0, 1.0]


def test_a_temperature_that_is_impossible():
    with pytest.raises(UserError, match="temperature is 0: expected a positive number"):
        make_residual("ancre", 4, 8, temperature=0)
