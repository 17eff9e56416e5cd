"""The layouts of other projects, and gates, as whole networks against their formulas written out in fp64."""

import pytest
import torch
from torch.nn import functional as F

from attnres import Norm, UserError, make_residual

WIDTH, SUBLAYERS, EPS = 16, 8, 1e-6


class Network:
    def __init__(self, dtype=torch.float64):
        g = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.weights = [(draw(WIDTH, WIDTH) / 4).to(dtype) for _ in range(SUBLAYERS)]
        self.gains = [(draw(WIDTH).abs() + 0.5).to(dtype) for _ in range(SUBLAYERS + 1)]
        self.embedding = draw(2, 3, WIDTH).to(dtype).requires_grad_()
        self.upstream = draw(2, 3, WIDTH).to(dtype)

    def sublayer(self, index, x):
        return torch.tanh(x @ self.weights[index])

    def normed(self, h, index):
        return F.rms_norm(h, (WIDTH,), self.gains[index], EPS)

    def run(self, residual):
        state = residual.start(self.embedding)
        for index in range(SUBLAYERS):
            x, state = residual.read(state, index, Norm(self.gains[index], eps=EPS))
            state = residual.write(state, index, self.sublayer(index, x))
        return residual.finish(state, Norm(self.gains[-1], eps=EPS))

    def compare(self, residual, expected, **close):
        leaves = [self.embedding, *(p for p in residual.parameters() if p.requires_grad)]
        actual = self.run(residual)
        assert_same = torch.testing.assert_close
        close = close or {"rtol": 1e-10, "atol": 1e-11}
        assert_same(actual, expected, **close)
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(actual, leaves, self.upstream, **options)
        assert any(grad.any() for grad in grads[1:])
        for a, b in zip(grads, torch.autograd.grad(expected, leaves, self.upstream, **options), strict=True):
            assert_same(a, b, **close)


def stirred(name, dtype=torch.float64, scale=0.4, **settings):
    residual = make_residual(name, SUBLAYERS, WIDTH, **settings).to(dtype)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_((scale * torch.randn(parameter.shape, generator=g, dtype=torch.float64)).to(dtype))
    return residual


def softmax_read(sources, query, gain, bias=0.0, temperature=1.0, null=False):
    values = torch.stack(sources)
    logits = F.rms_norm(values, (WIDTH,), gain, EPS) @ query / temperature
    logits = torch.cat([logits[:-1], logits[-1:] + bias])
    if null:
        logits = torch.cat([logits, torch.zeros_like(logits[:1])])
    weights = logits.softmax(0)[: len(sources)]
    return (weights.unsqueeze(-1) * values).sum(0)


def shared(residual, index, stream, read):
    gates = residual.gates
    if gates.alpha is not None:
        return (1 - gates.alpha[index]) * stream + gates.alpha[index] * read
    if gates.gate is None:
        return read
    gate = gates.gate[index]
    if gates.gate_weight is not None:
        gate = gate + torch.einsum("oi,...i->...o", gates.gate_weight[index], stream)
    return (1 - gate.sigmoid()) * stream + gate.sigmoid() * read


def cumulative(network, residual, size):
    """open-attention-residuals: blocks = [embedding], partial = embedding, never reset; no read at the output."""
    blocks, partial = [network.embedding], network.embedding
    bias = residual.gates.bias
    for index in range(SUBLAYERS):
        b = 0.0 if bias is None else bias[index]
        h = softmax_read([*blocks, partial], residual.query[index], residual.gain[index], b)
        h = shared(residual, index, partial, h)
        partial = partial + network.sublayer(index, network.normed(h, index))
        if (index + 1) % size == 0:
            blocks = [*blocks, partial]
    return network.normed(partial, SUBLAYERS)


def paper(network, residual, size, scale, temperature=1.0, null=False):
    blocks, partial, gates = [network.embedding], None, residual.gates
    for index in range(SUBLAYERS + 1):
        if index and (index % size == 0 or index == SUBLAYERS):
            blocks, partial = [*blocks, partial], None
        sources = blocks if partial is None else [*blocks, partial]
        if len(sources) == 1:
            h = sources[0]
        else:
            b = 0.0 if gates.bias is None else gates.bias[index]
            h = softmax_read(sources, residual.query[index], residual.gain[index], b, temperature, null)
            h = shared(residual, index, sum(sources), h * (len(sources) + null if scale == "sum" else 1))
        x = network.normed(h, index)
        if index == SUBLAYERS:
            return x
        out = network.sublayer(index, x)
        partial = out if partial is None else partial + out
    raise AssertionError


def boundary(network, residual, size, normed=False):
    """The nanoGPT study: a plain residual in a block; the mix of embedding and block ends becomes the stream. The blog
    (normed) has the mixes of earlier blocks in its list, not what they ended with: `checkpoints.append(x)` after it."""
    ends, x = [network.embedding], network.embedding
    for index in range(SUBLAYERS):
        x = x + network.sublayer(index, network.normed(x, index))
        if (index + 1) % size == 0 or index + 1 == SUBLAYERS:
            ends.append(x)
            query, gain = residual.query[len(ends) - 2], residual.gain[len(ends) - 2]
            if normed:
                keys = F.rms_norm(torch.stack(ends), (WIDTH,), gain, EPS)
                weights = (keys @ query / WIDTH**0.5).softmax(0)
                ends[-1] = x = (weights.unsqueeze(-1) * keys).sum(0)
            else:
                x = softmax_read(ends, query, gain)
    return network.normed(x, SUBLAYERS)


GATES = {
    "plain": {},
    "recency": {"recency_bias": 3.0},
    "scalar": {"gate": "scalar", "recency_bias": 0.0},
    "vector": {"gate": "vector", "gate_init": -1.0},
    "alpha": {"alpha": "learnable"},
}
gates = pytest.mark.parametrize("gates", GATES.values(), ids=GATES)


@gates
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_cumulative_reads_snapshots_of_a_stream_that_is_never_reset(size, gates):
    network, residual = Network(), stirred("cumulative", block_size=size, **gates)
    network.compare(residual, cumulative(network, residual, size))


@pytest.mark.parametrize("size", [1, 4])
def test_cumulative_in_fp32_and_with_every_implementation(backend, size):
    network, residual = Network(torch.float32), stirred("cumulative", torch.float32, block_size=size)
    network.compare(residual, cumulative(network, residual, size), rtol=2e-4, atol=2e-5)


def test_cumulative_in_two_phases_is_cumulative_in_one_pass(monkeypatch):
    network, residual = Network(), stirred("cumulative", block_size=4)
    monkeypatch.setattr("attnres.residuals.mechanisms.depth_attention.in_two_phases", lambda *args, **kw: True)
    state = residual.start(network.embedding)
    assert state.reads
    network.compare(residual, cumulative(network, residual, 4))


@gates
@pytest.mark.parametrize("scale", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 3])
def test_gates_hold_reads_of_the_papers_layout_back_to_the_running_sum(size, scale, gates):
    residual = stirred("block", block_size=size, read_scale=scale, **gates)
    network = Network()
    network.compare(residual, paper(network, residual, size, scale))
    full = stirred("full", read_scale=scale, **gates)
    network.compare(full, paper(network, full, 1, scale))


@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_temperature_and_null_source_change_the_softmax(scale):
    network = Network()
    residual = stirred("block", block_size=2, read_temperature=0.5, null_source=True, read_scale=scale)
    network.compare(residual, paper(network, residual, 2, scale, temperature=0.5, null=True))


@pytest.mark.parametrize("layout", [{"name": "block", "block_size": 2}, {"name": "cumulative", "block_size": 2}])
@pytest.mark.parametrize(
    "gate", [{"gate": "scalar", "gate_init": -60}, {"gate": "vector", "gate_init": -60}, {"alpha": "learnable"}]
)
def test_a_closed_gate_is_the_standard_residual(layout, gate):
    network, settings = Network(), {**layout, **gate}
    residual = make_residual(settings.pop("name"), SUBLAYERS, WIDTH, **settings).double()
    with torch.no_grad():
        residual.query.normal_(generator=torch.Generator().manual_seed(2))
    expected = network.run(make_residual("standard", SUBLAYERS, WIDTH))
    torch.testing.assert_close(network.run(residual), expected, rtol=1e-12, atol=1e-12)


def test_a_large_recency_bias_brings_cumulative_near_the_standard_residual():
    network = Network()
    expected = network.run(make_residual("standard", SUBLAYERS, WIDTH))

    def distance(**settings):
        residual = make_residual("cumulative", SUBLAYERS, WIDTH, block_size=2, **settings).double()
        return (network.run(residual) - expected).abs().max().item()

    assert distance() > distance(recency_bias=3.0) > distance(recency_bias=10.0)
    assert distance() > 0.1 and distance(recency_bias=10.0) < 1e-3 and distance(recency_bias=60.0) < 1e-12


def test_the_frozen_bias_takes_no_gradient_and_stays_saved():
    residual = make_residual("cumulative", SUBLAYERS, WIDTH, recency_bias=0.0, recency_bias_frozen=True)
    assert not residual.gates.bias.requires_grad and "gates.bias" in residual.state_dict()
    plain = make_residual("cumulative", SUBLAYERS, WIDTH)
    network = Network()
    torch.testing.assert_close(network.run(residual.double()), network.run(plain.double()))


@pytest.mark.parametrize("normed", [False, True], ids=["boundary", "boundary_normed"])
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_boundary_mixes_states_at_block_ends_into_the_stream(size, normed):
    network = Network()
    residual = stirred("boundary_normed" if normed else "boundary", block_size=size)
    network.compare(residual, boundary(network, residual, size, normed))


class Seen:
    def __init__(self):
        self.reads = {}

    def on_start(self, embedding):
        pass

    def on_read(self, read, h, weights, values):
        self.reads[read] = weights

    def on_write(self, index, output):
        pass


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cumulative", {"block_size": 4}),
        ("cumulative", {"block_size": 1, "recency_bias": 1.0, "null_source": True}),
        ("boundary", {"block_size": 4}),
        ("boundary_normed", {"block_size": 2}),
        ("block", {"block_size": 3, "gate": "vector", "null_source": True}),
    ],
)
def test_recording_sees_every_read_and_changes_nothing(name, settings):
    network, residual = Network(), stirred(name, **settings)
    expected = network.run(residual)
    residual.observer = seen = Seen()
    assert torch.equal(network.run(residual), expected)
    assert sorted(seen.reads) == list(range(SUBLAYERS + 1))
    for index, weights in seen.reads.items():
        names = [source.name for source in residual.sources(index)]
        assert weights.shape == (6, len(names)) and len(set(names)) == len(names)
        torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("share", [{"gate": "scalar"}, {"alpha": "learnable"}], ids=["gate", "alpha"])
def test_rows_of_the_mixing_matrix_lie_where_the_weights_do(share):
    """As a recording's on the CPU do of a model on a GPU; meta stands for the other device."""
    weights = torch.empty(6, 3, device="meta")
    row = make_residual("full", SUBLAYERS, WIDTH, **share).mixing_row(2, weights, [])
    assert row.device.type == "meta" and row.shape == (6, SUBLAYERS + 1)


def test_sources_are_named():
    rows = [[source.name for source in read.sources] for read in stirred("cumulative", block_size=4).layout()]
    assert rows[0] == ["embedding", "stream"] and rows[5] == ["embedding", "state 4", "stream"]
    assert rows[8] == ["stream"]
    rows = [[source.name for source in read.sources] for read in stirred("boundary", block_size=4).layout()]
    assert rows[3] == ["stream"] and rows[8] == ["embedding", "block 1", "block 2"]


def test_blocks_are_counted_as_each_project_does():
    assert make_residual("cumulative", 14, WIDTH, num_blocks=4).block_size == 4  # ceil(7 / 4) layers
    assert make_residual("cumulative", 14, WIDTH, num_blocks=70).block_size == 2
    assert make_residual("boundary", 24, WIDTH, num_blocks=4).num_blocks == 4
    three = ("attention", "cross_attention", "mlp")
    assert make_residual("cumulative", 12, WIDTH, num_blocks=3, sublayers=three).block_size == 6  # ceil(4 / 3) layers


def test_queries_whose_logits_are_divided_by_the_root_of_the_width_are_not_slowed():
    def slow(name, **settings):
        return make_residual(name, SUBLAYERS, WIDTH, **settings).slow

    assert set(slow("boundary")) == {"query", "gain"} and not slow("boundary_normed")
    for name in ("full", "block", "cumulative"):
        assert {"query", "gain"} < set(slow(name)) == set(slow(name, read_temperature=0.5))
        assert not slow(name, read_temperature="sqrt_width") and not slow(name, read_temperature=4.0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cumulative", {"block_size": 2, "num_blocks": 2}, "give one of them"),
        ("cumulative", {"block_size": 9}, "1 to 8 sublayers"),
        ("boundary", {"block_size": 3}, "even number"),
        ("boundary", {"num_blocks": 3}, "divides the 4 layers"),
        ("boundary", {"block_size": 2, "num_blocks": 2}, "give one of them"),
        ("block", {"gate": "scaler"}, "did you mean 'scalar'"),
        ("block", {"alpha": "lernable"}, "did you mean 'learnable'"),
        ("block", {"gate": "scalar", "alpha": "learnable"}, "give one"),
        ("full", {"recency_bias_frozen": True}, "without recency_bias"),
        ("full", {"recency_bias": "3"}, "expected a number"),
        ("full", {"read_temperature": 0}, "positive number"),
        ("full", {"null_source": 1}, "true or false"),
    ],
)
def test_wrong_settings_are_one_sentence(name, settings, message):
    with pytest.raises(UserError, match=message):
        make_residual(name, SUBLAYERS, WIDTH, **settings)


def test_what_stays_in_a_state_is_kept_and_what_is_in_it_twice_crosses_once():
    denseformer = make_residual("denseformer", 6, 8)
    before, after = denseformer.slots(4), denseformer.slots(5)
    assert [slot.kept for slot in before] == [False, True, True, True]  # the stream; the embedding and two layers
    assert {slot.name for slot in before if slot.kept} == {slot.name for slot in after if slot.kept}
    siamese = make_residual("siamese_norm", 4, 8)
    assert [len(siamese.slots(index)) for index in (0, 1)] == [1, 2]
    embedding = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    (packed,) = siamese.pack(siamese.start(embedding), 0)
    assert all(torch.equal(stream, embedding) for stream in siamese.unpack([packed], 0))
