"""Review Residuals against the author's own lines, and its limits."""

import pytest
import torch
from formula import SHAPES, Network, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("gate", ["vector", "scalar"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gate_sees_the_stream_and_what_is_added(gate, shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            u = network.f(index, network.norm(index, x))
            units = [v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() for v in (x, u)]
            logit = torch.cat(units, -1) @ parameters["weight"][index].T + parameters["bias"][index]
            x = x + u / (1 + torch.exp(-logit))
        return network.norm(network.sublayers, x)

    check_formula("review", formula, shape, gate=gate)


@pytest.mark.parametrize("gate", ["vector", "fixed"])
def test_branches_are_halved_at_the_start_which_the_control_keeps(gate):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x)) / 2
        return network.norm(network.sublayers, x)

    network, residual = Network(*SHAPES[1]), make_residual("review", 7, 12, gate=gate).double()
    torch.testing.assert_close(network.run(residual), formula(network, {}), rtol=1e-12, atol=1e-12)
    assert residual.traits.is_control == (gate == "fixed") != bool(list(residual.parameters()))
    assert sum(p.numel() for p in residual.parameters()) == (7 * (2 * 12**2 + 12) if gate == "vector" else 0)


def test_an_open_gate_is_the_standard_residual():
    network, residual = Network(*SHAPES[0]), make_residual("review", 8, 16, gate_start=40.0).double()
    torch.testing.assert_close(network.run(residual), network.run(make_residual("standard", 8, 16)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gate": "fix"}, "unknown gate 'fix'.*did you mean 'fixed'"),
        ({"gate_start": "half"}, "gate_start is 'half': expected a number"),
        ({"eps": 0}, "eps is 0: expected a positive number"),
    ],
)
def test_impossible_settings(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_residual("review", 4, 8, **settings)
