"""Highway against its formula, and the stick-breaking weights of its reads."""

import pytest
import torch
from formula import SHAPES, Network, check_formula

from attnres import UserError, make_residual
from attnres.residuals.check.reads import Recording


@pytest.mark.parametrize("gate", ["vector", "scalar"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gate_carries_the_stream_or_takes_the_output(shape, gate):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            weight, bias = parameters["weight"][index], parameters["bias"][index]
            transform = 1 / (1 + torch.exp(-(torch.einsum("gd,...d->...g", weight, x) + bias)))
            x = transform * network.f(index, network.norm(index, x)) + (1 - transform) * x
        return network.norm(network.sublayers, x)

    check_formula("highway", formula, shape, gate=gate)


def test_gates_start_nearly_closed_for_every_token():
    residual = make_residual("highway", 4, 8)
    assert residual.weight.shape == (4, 8, 8) and not residual.weight.any()
    assert torch.equal(residual.bias, torch.full((4, 8), -2.0))
    assert torch.equal(make_residual("highway", 4, 8, gate="scalar", gate_init=-3).bias, torch.full((4, 1), -3.0))


def test_weights_of_a_scalar_gate_break_a_stick():
    """M_{i -> l} = g_i prod_{j > i} (1 - g_j), the embedding's the product of all."""
    network = Network(3, 8, (5,))
    residual = make_residual("highway", 3, 8, gate="scalar").double()
    with torch.no_grad():
        residual.weight.copy_(torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(1)))
    recording = residual.observer = Recording()
    x, gates = network.embedding, []
    for index in range(3):
        gates.append(torch.sigmoid(x @ residual.weight[index, 0] + residual.bias[index]))
        x = torch.lerp(x, network.f(index, network.norm(index, x)), gates[-1].unsqueeze(-1))
    network.run(residual)
    a, b, c = gates
    expected = torch.stack([(1 - a) * (1 - b) * (1 - c), a * (1 - b) * (1 - c), b * (1 - c), c], -1)
    torch.testing.assert_close(recording.reads[3][1], expected.detach())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gate": "vectr"}, "unknown gate 'vectr'.*did you mean 'vector'"),
        ({"gate_init": "low"}, "gate_init is 'low': expected a number"),
    ],
)
def test_impossible_settings(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_residual("highway", 4, 8, **settings)
