"""Learned block boundaries: the read against its formula, gates, their annealing, penalty and floor."""

import math

import pytest
import torch
from formula import SHAPES, Network, check_formula
from tiny import SIZE
from torch.nn import functional as F

from attnres import UserError, make_residual
from attnres.models import build, load

STUDY = {"temperature_start": 5.0, "temperature_end": 0.1, "anneal_start": 0.2, "anneal_end": 0.7}


def network_of_gates(network, parameters, gates):
    """Every layer's state is a source with the prior g_i g_l against the stream itself, whose prior is one."""
    x = network.embedding
    ends, layers = [x], math.ceil(network.sublayers / 2)
    gates = [1.0, *gates, 1.0]  # of the embedding, which is always there, and of the last layer, where the head reads
    for layer in range(1, layers + 1):
        for index in range(2 * layer - 2, min(2 * layer, network.sublayers)):
            x = x + network.f(index, network.norm(index, x))
        ends.append(x)
        query, gain = parameters["query"][layer - 1], parameters["gain"][layer - 1]
        scores = [(F.rms_norm(end, (network.width,), gain, 1e-6) @ query).exp() for end in ends]
        odds = [gates[i] * gates[layer] * scores[i] for i in range(layer)] + [scores[layer]]
        x = sum(part.unsqueeze(-1) * end for part, end in zip(odds, ends, strict=True)) / sum(odds).unsqueeze(-1)
    return network.norm(network.sublayers, x)


@pytest.mark.parametrize("shape", SHAPES)
def test_gates_are_priors_of_the_softmax(shape):
    def formula(network, parameters):
        return network_of_gates(network, parameters, 1 / (1 + torch.exp(-parameters["logit"] / 5.0)))

    check_formula("adaptive", formula, shape)


@pytest.mark.parametrize(("ends", "size"), [((4,), 8), ((2, 4, 6), 4)])
def test_hard_gates_are_boundary_with_these_blocks(ends, size):
    """Of 8 layers, with a gate of one after some and of zero after the others."""
    network = Network(16, 12, (5,))
    ours = make_residual("adaptive", 16, 12).double()
    theirs = make_residual("boundary", 16, 12, block_size=size).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        theirs.query.copy_(torch.randn(theirs.query.shape, generator=generator))
        ours.query[[end - 1 for end in (*ends, 8)]] = theirs.query
        ours.logit.copy_(torch.tensor([5e3 if layer in ends else -5e3 for layer in range(1, 8)]))
    torch.testing.assert_close(network.run(ours), network.run(theirs), rtol=1e-12, atol=1e-12)


def test_closed_gates_leave_the_stream_alone_until_the_head():
    network, residual = Network(8, 12, (5,)), make_residual("adaptive", 8, 12, gate_init=-5e3).double()
    x = network.embedding
    for index in range(8):
        x = x + network.f(index, network.norm(index, x))
    expected = network.norm(8, (network.embedding + x) / 2)  # zero queries: the embedding and the last state, evenly
    torch.testing.assert_close(network.run(residual), expected, rtol=1e-12, atol=1e-12)


def test_a_closed_gate_still_has_a_gradient():
    """At 0.001, a tenth of where the study cuts it off."""
    network, residual = Network(8, 12, (5,)), make_residual("adaptive", 8, 12, gate_init=5 * math.log(0.001)).double()
    (network.run(residual) * network.probe).sum().backward()
    assert residual.learned()["gates"].values.tolist() == pytest.approx([0.001] * 3, rel=2e-3)
    assert (residual.logit.grad.abs() > 1e-7).all()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0.0: 5.0, 0.2: 5.0, 0.45: 2.55, 0.7: 0.1, 1.0: 0.1}),
        ("cosine", {0.1: 5.0, 0.325: 0.1 + 4.9 * (1 + math.sqrt(0.5)) / 2, 0.45: 2.55, 0.9: 0.1}),
        ("exponential", {0.2: 5.0, 0.45: math.sqrt(0.5), 0.575: 5 ** (1 / 4) * 0.1 ** (3 / 4), 0.7: 0.1}),
        ("none", {0.0: 5.0, 0.45: 5.0, 1.0: 5.0}),
    ],
)
def test_the_temperature_over_training(schedule, expected):
    residual = make_residual("adaptive", 8, 4, schedule=schedule, **STUDY)
    for fraction, temperature in expected.items():
        residual("set_progress", fraction)
        assert residual.temperature.item() == pytest.approx(temperature, rel=1e-6), fraction
        assert residual.learned()["temperature"].values.item() == pytest.approx(temperature, rel=1e-6)


def test_the_penalty_is_of_the_count_alone():
    """The study's start: 11 gates of sigmoid(-2/5), whose sum it pulls to 4 with a weight of 0.1."""
    residual = make_residual("adaptive", 24, 4).double()
    gate = 1 / (1 + math.exp(0.4))
    assert residual.learned()["boundaries"].values.item() == pytest.approx(11 * gate) == pytest.approx(4.41, abs=0.01)
    penalty = residual("penalty")
    assert penalty.item() == pytest.approx(0.1 * (11 * gate - 4) ** 2)
    penalty.backward()
    slope = 0.2 * (11 * gate - 4) * gate * (1 - gate) / 5
    assert residual.logit.grad.tolist() == pytest.approx([slope] * 11)
    assert residual.query.grad is None
    residual("set_progress", 1.0)  # nearly closed: the most that the study adds to its loss
    assert residual("penalty").item() == pytest.approx(1.6, abs=1e-3)
    assert make_residual("adaptive", 24, 4, target_weight=0)("penalty").item() == 0


@pytest.mark.parametrize("layers", [1, 3, 5, 12])
def test_the_target_is_four_or_all_there_are(layers):
    assert make_residual("adaptive", 2 * layers, 4).target_count == min(4, layers - 1)
    all_open = make_residual("adaptive", 2 * layers, 4, gate_init=5e3)
    assert all_open("penalty").item() == pytest.approx(0.1 * max(0, layers - 5) ** 2)


def test_a_floor_holds_the_sum_of_the_gates_and_their_order():
    free, held = (make_residual("adaptive", 14, 4, least_count=least).double() for least in (0, 2))
    starts = torch.tensor([-2.0, -0.5, -3.0, 0.1, -2.5, -1.0], dtype=torch.float64)
    for residual in (free, held):
        with torch.no_grad():
            residual.logit.copy_(starts)
    for fraction in (0.0, 0.3, 0.5, 0.7, 1.0):
        for residual in (free, held):
            residual("set_progress", fraction)
        tables = [residual.learned() for residual in (free, held)]
        count, lifted = (table["boundaries"].values.item() for table in tables)
        assert lifted == pytest.approx(max(2.0, count), abs=1e-6)
        odds = [torch.logit(table["gates"].values.double()) for table in tables]
        shift = odds[1] - odds[0]  # one number for all gates
        assert shift.max().item() == pytest.approx(shift.min().item(), abs=1e-3) and shift.min() >= -1e-6
        assert held("penalty").item() == free("penalty").item()  # a sum that is held would have no gradient
    assert count < 1.5 and tables[1]["gates"].values.topk(2).indices.tolist() == [3, 1]


def test_the_floors_gradient_is_that_of_finite_differences():
    residual = make_residual("adaptive", 14, 4, least_count=2.5, gate_init=-6.0, schedule="none").double()
    with torch.no_grad():
        residual.logit.add_(torch.randn(6, generator=torch.Generator().manual_seed(0)))
    weights = torch.arange(6, dtype=torch.float64)

    def value(logit):
        with torch.no_grad():
            residual.logit.copy_(logit)
        return (torch.sigmoid(residual.opening) * weights).sum()

    start, (grad,) = (
        residual.logit.detach().clone(),
        torch.autograd.grad(value(residual.logit.detach()), residual.logit),
    )
    steps = 1e-5 * torch.eye(6, dtype=torch.float64)
    slopes = [(value(start + step) - value(start - step)).item() / 2e-5 for step in steps]
    assert grad.tolist() == pytest.approx(slopes, abs=1e-6) and grad.abs().max() > 0.01


def test_start_biased_open():
    residual = make_residual("adaptive", 24, 4, gate_init=3.0)
    assert residual.logit.tolist() == [3.0] * 11
    assert residual.learned()["gates"].values.tolist() == pytest.approx([1 / (1 + math.exp(-0.6))] * 11)


def test_a_model_evaluates_as_it_was_saved(tmp_path):
    model = build(SIZE, "adaptive", vocab_size=50, max_positions=16)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        model.residual.query.normal_(generator=torch.Generator().manual_seed(0))
        early = model(input_ids=ids).logits
        model.residual("set_progress", 0.61)
        late = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert loaded.residual.progress.item() == pytest.approx(0.61)
        assert torch.equal(loaded(input_ids=ids).logits, late) and not torch.allclose(early, late, atol=1e-3)
        half = load(tmp_path, dtype="bf16").residual
        assert half.progress.dtype is torch.float32 and half.progress.item() == loaded.residual.progress.item()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler itself
def test_progress_compiles_nothing_anew():
    network, residual = Network(4, 8, (3,)), make_residual("adaptive", 4, 8).double()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(network.run, backend=backend, fullgraph=True)
    results = []
    for fraction in (0.1, 0.5, 0.9):
        residual("set_progress", fraction)
        results.append((compiled(residual), network.run(residual)))
    torch._dynamo.reset()
    assert len(graphs) == 1
    for one, other in results:
        torch.testing.assert_close(one, other)
    assert not torch.equal(results[0][0], results[2][0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_count": 9}, "target_count is 9: expected a number, at least 0, at most 3"),
        ({"target_count": True}, "target_count is True"),
        ({"least_count": 3.5}, "least_count is 3.5: expected a number, at least 0, at most 3"),
        ({"target_count": 1, "least_count": 2}, "least_count is 2: expected a number, at least 0, at most 1"),
        ({"least_count": 3}, "least_count is 3, the number of all gates"),
        ({"target_weight": -1}, "target_weight is -1: expected a number, at least 0"),
        ({"gate_init": "open"}, "gate_init is 'open': expected a number"),
        ({"gate_init": math.inf}, "gate_init is inf: expected a number"),
        ({"schedule": "liner"}, "did you mean 'linear'"),
        ({"temperature_start": 0}, "temperature_start is 0: expected a positive number"),
        ({"temperature_end": -0.1}, "temperature_end is -0.1: expected a positive number"),
        ({"anneal_start": 1.2}, "anneal_start is 1.2"),
        ({"anneal_start": 0.7, "anneal_end": 0.7}, "anneal_start is 0.7 and anneal_end 0.7: the end must come later"),
        ({"target": 4}, "unknown setting of residual 'adaptive'"),
    ],
)
def test_impossible_settings_get_a_sentence(settings, message):
    with pytest.raises(UserError) as error:
        make_residual("adaptive", 8, 4, **settings)
    assert message in str(error.value) and "\n" not in str(error.value)
