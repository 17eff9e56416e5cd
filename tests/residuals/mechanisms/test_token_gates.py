"""Rules in which a token weighs stream and output, each against its formula."""

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
    ("name", "settings", "sentence"),
    [
        ("highway", {"gate": "vectr"}, "unknown gate 'vectr'.*did you mean 'vector'"),
        ("highway", {"gate_init": "low"}, "gate_init is 'low': expected a number"),
        ("review", {"gate": "fix"}, "unknown gate 'fix'.*did you mean 'fixed'"),
        ("review", {"gate_start": "half"}, "gate_start is 'half': expected a number"),
        ("review", {"eps": 0}, "eps is 0: expected a positive number"),
    ],
)
def test_impossible_settings(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_residual(name, 4, 8, **settings)


EPS = 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_part_along_an_output_is_replaced(shape):
    def formula(network, parameters):
        p, x = parameters, network.embedding
        identity = torch.eye(network.width, dtype=torch.float64)
        for index in range(network.sublayers):
            context = network.norm(index, x)
            output = network.f(index, context)
            k = (output / torch.sqrt(output.square().sum(-1, keepdim=True) + EPS**2)).unsqueeze(-1)
            beta = 2 * torch.sigmoid(context @ p["step_weight"][index] + p["step_bias"][index])[..., None, None]
            value = 4 * torch.sigmoid(x @ p["value_weight"][index] + p["value_bias"][index])[..., None, None]
            x = ((identity - beta * k @ k.mT) @ x.unsqueeze(-1) + beta * k * value).squeeze(-1)
        return network.norm(network.sublayers, x)

    check_formula("ddl", formula, shape, eps=EPS)


def test_it_starts_by_replacing_that_part_by_two():
    residual = make_residual("ddl", 2, 8)
    x, f = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    _, state = residual.read(x, 0, lambda h: h)
    assert torch.equal(state.step, torch.ones(5, 1))
    k = f / f.norm(dim=-1, keepdim=True)
    torch.testing.assert_close((residual.write(state, 0, f) * k).sum(-1), torch.full((5,), 2.0))
