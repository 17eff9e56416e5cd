"""Recording sees what the model really does, and changes nothing."""

import numpy as np
import pytest
import torch
from sample_mechanisms import LINEAR, WEIGHED, crossed
from tiny import SIZE, stir
from torch import nn

from attnres import RESIDUALS, Norm, UserError, depth_read_reference, make_residual
from attnres.inspect import Ablate, intervene, record
from attnres.models import build
from attnres.ops import plain_torch
from attnres.residuals import Editor


def make(residual, **settings):
    model = build(SIZE, residual, vocab_size=50, max_positions=32, settings=settings)
    stir(model.residual, 0.4, seed=1)
    return model


def some_ids(rows=2, seed=2):
    return torch.randint(0, 50, (rows, 9), generator=torch.Generator().manual_seed(seed))


def forward(model, **kwargs):
    return model(input_ids=some_ids(), use_cache=False, **kwargs).logits


@pytest.mark.parametrize("residual", crossed())
def test_recording_changes_no_logit_and_no_gradient(residual):
    model = make(residual)
    expected = forward(model)
    expected.square().mean().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with record(model):
        seen = forward(model)
        seen.square().mean().backward()
    assert torch.equal(seen, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))


@pytest.mark.parametrize("residual", crossed())
def test_magnitudes_are_there_for_every_depth(residual):
    with record(model := make(residual)) as trace:
        forward(model).square().mean().backward()
    reads = len(model.residual.layout())
    assert [len(values) for values in (trace.output_rms, trace.input_rms, trace.grad_rms)] == [6, reads, 6]
    assert all(value > 0 for values in (trace.output_rms, trace.input_rms, trace.grad_rms) for value in values)
    assert trace.tokens == 18
    assert (trace.routing is not None) == RESIDUALS[residual].traits.by_token


def test_magnitudes_are_root_mean_squares_of_what_sublayers_wrote_and_read():
    model = make("standard")
    layer = model.model.layers[1]
    seen = {}
    layer.mlp.register_forward_hook(lambda _, args, out: seen.update(out=out))
    with record(model) as trace:
        out = model(input_ids=torch.arange(9).unsqueeze(0), use_cache=False, output_hidden_states=True)
    assert trace.output_rms[3] == pytest.approx(seen["out"].pow(2).mean().sqrt().item(), rel=1e-5)
    assert trace.input_rms[2] == pytest.approx(out.hidden_states[1].pow(2).mean().sqrt().item(), rel=1e-5)


def test_gradients_are_those_of_the_sublayer_outputs():
    model = make("block", block_size=2)
    seen = {}
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda _, args, out: out.register_hook(lambda grad: seen.update(grad=grad)) and None)
    with record(model) as trace:
        forward(model).square().mean().backward()
    assert trace.grad_rms[1] == pytest.approx(seen["grad"].pow(2).mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize(("residual", "settings"), [("full", {}), ("block", {"block_size": 4})])
def test_weights_are_those_of_the_reference_on_the_true_sources(residual, settings):
    model = make(residual, **settings)
    embedding, outputs = {}, []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: embedding.update(v=out.detach()))
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, out: outputs.append(out[0].detach()))
        layer.mlp.register_forward_hook(lambda _, args, out: outputs.append(out.detach()))
    with record(model) as trace:
        forward(model)
    size = settings.get("block_size", 1)
    assert trace.routing["reads"] == ["attention 0", "mlp 0", "attention 1", "mlp 1", "attention 2", "mlp 2", "output"]
    for index in range(7):
        sources = [embedding["v"]]
        for start in range(0, index, size):
            sources.append(torch.stack(outputs[start : min(start + size, index)]).sum(0))
        _, weights = depth_read_reference(sources, model.residual.query[index], model.residual.gain[index])
        row, names = trace.routing["weights"][index], trace.routing["sources"][index]
        assert len(row) == len(names) == len(sources)
        torch.testing.assert_close(torch.tensor(row), weights.mean((1, 2)).detach(), rtol=1e-4, atol=1e-5)


def test_source_names_follow_the_blocks():
    with record(model := make("block", block_size=4)) as trace:
        forward(model)
    assert trace.routing["sources"][3] == ["embedding", "partial"]
    assert trace.routing["sources"][4] == ["embedding", "block 1"]
    assert trace.routing["sources"][6] == ["embedding", "block 1", "block 2"]


def test_gradients_are_means_over_the_tokens_that_have_them():
    model = make("block", block_size=2)
    with record(model) as plain:
        forward(model).square().mean().backward()
    with record(model) as trace:
        with torch.no_grad():
            forward(model)
        forward(model).square().mean().backward()
    assert trace.tokens == 2 * plain.tokens
    assert trace.grad_rms == pytest.approx(plain.grad_rms, rel=1e-5)


@pytest.mark.parametrize("residual", ["block", "standard"])
def test_a_model_in_double_precision_is_recorded(residual):
    with record(model := make(residual)) as single:
        forward(model)
    with record(model.double()) as double:
        forward(model)
    assert double.input_rms == pytest.approx(single.input_rms, rel=1e-4)
    assert double.entropy == pytest.approx(single.entropy, rel=1e-4)


def test_what_is_compiled_runs_uncompiled_while_it_is_recorded():
    graphs = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with record(make("standard")):
        compiled(torch.ones(1))
    assert not graphs
    compiled(torch.ones(1))
    assert len(graphs) == 1


def test_means_run_over_everything_recorded():
    model = make("full")
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(3))
    with record(model) as whole:
        model(input_ids=ids, use_cache=False)
    with record(model) as parts:
        for part in ids.split(2):
            model(input_ids=part, use_cache=False)
    assert parts.tokens == whole.tokens == 36
    for a, b in zip(whole.routing["weights"], parts.routing["weights"]):
        assert a == pytest.approx(b, rel=1e-5)
    assert whole.output_rms == pytest.approx(parts.output_rms, rel=1e-5)


def in_double(model):
    """The model's reads, outputs and recording of one pass in double precision."""
    model = model.double()
    model.residual.observer = values = Values()
    forward(model)
    model.residual.observer = None
    with record(model, tokens=True) as trace:
        forward(model)
    return values, trace


@pytest.mark.parametrize(
    ("residual", "settings"), [("full", {}), ("block", {"block_size": 2}), ("standard", {}), ("rescaled", {})]
)
def test_a_contribution_is_the_weighted_sources_projection_on_the_read(residual, settings):
    """By hand: sources summed from what was written, the read summed from them, projections in double precision."""
    values, trace = in_double(make(residual, **settings))
    outputs = torch.stack(values.outputs).detach()
    for index, read in enumerate(trace.layout):
        weights = trace.token_weights[index].double()
        parts = [outputs[one.span.start : one.span.stop].sum(0) for one in read.sources]
        terms = torch.stack([part * weights[..., i, None] for i, part in enumerate(parts)])
        h = terms.sum(0)
        expected = (terms * h).sum(-1) / (h * h).sum(-1)
        torch.testing.assert_close(
            trace.token_contributions[index].double(), expected.movedim(0, -1), rtol=0, atol=1e-5
        )
        assert trace.contribution[index] == pytest.approx(expected.mean((1, 2)).tolist(), abs=1e-5)
        assert sum(trace.contribution[index]) == pytest.approx(1)
        sizes = terms.square().mean(-1).sqrt().mean((1, 2))
        assert trace.size[index] == pytest.approx(sizes.tolist(), rel=1e-5)


def test_a_blocks_contribution_is_the_sum_of_its_outputs():
    _, trace = in_double(make("block", block_size=2))
    assert trace.mixing_contribution.sum(1) == pytest.approx(np.ones(7))
    for read, row, parts in zip(trace.layout, trace.contribution, trace.mixing_contribution):
        assert row == pytest.approx([parts[one.span.start : one.span.stop].sum() for one in read.sources], abs=1e-5)


def test_a_recording_without_contributions_holds_no_outputs():
    with record(model := make("standard"), contributions=False) as trace:
        forward(model)
    assert trace.contribution == [[]] * 7 and trace.mixing_contribution is None and not trace.token_contributions
    assert trace.weights[3] == [1.0] * 4


def test_two_recordings_of_one_model_and_foreign_models_are_refused():
    model = make("full")
    with record(model), pytest.raises(ValueError, match="recorded already"), record(model):
        pass
    with pytest.raises(ValueError, match="no residual"), record(torch.nn.Linear(2, 2)):
        pass


SETTINGS = {
    "block": {"num_blocks": 2},
    "cumulative": {"num_blocks": 2},
    "boundary": {"block_size": 2},
    "boundary_normed": {"block_size": 2},
}
GATED = [
    ("block", {"num_blocks": 2, "read_scale": "sum"}),
    ("block", {"num_blocks": 2, "gate": "scalar", "read_scale": "sum", "null_source": True}),
    ("full", {"alpha": "learnable"}),
    ("cumulative", {"num_blocks": 2, "gate": "scalar", "recency_bias": 3.0}),
]


class Values:
    """Keeps every output and every read of one pass."""

    def on_start(self, embedding):
        self.outputs, self.reads, self.sources = [embedding], [], []

    def on_write(self, index, output):
        self.outputs.append(output)

    def on_read(self, read, h, weights, values):
        self.reads.append(h)
        self.sources.append((weights, list(values)))


@pytest.mark.parametrize(
    ("residual", "settings"),
    [(name, SETTINGS.get(name, {})) for name in sorted(RESIDUALS) if name in LINEAR] + GATED,
)
def test_the_mixing_matrix_makes_every_read_out_of_the_outputs(residual, settings):
    model = make(residual, **settings)
    model.residual.observer = values = Values()
    forward(model)
    model.residual.observer = None
    with record(model, tokens=True) as trace:
        forward(model)
    for index, rows in enumerate(trace.token_mixing):
        parts = torch.stack([*values.outputs, *(7 - len(values.outputs)) * [values.outputs[0]]], -1)
        made = (parts * rows.unsqueeze(-2)).sum(-1)
        torch.testing.assert_close(made, values.reads[index], rtol=1e-4, atol=1e-5)
        assert not rows[..., index + 1 :].any()
        torch.testing.assert_close(torch.tensor(trace.mixing[index]), rows.double().mean((0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("residual", crossed(set(RESIDUALS) - set(LINEAR)))
def test_what_is_no_sum_of_outputs_has_no_mixing_matrix(residual):
    model = make(residual, **SETTINGS.get(residual, {}))
    with record(model) as trace:
        forward(model)
    assert trace.mixing is None


def test_the_standard_residual_reads_ones():
    with record(model := make("standard")) as trace:
        forward(model)
    assert trace.weights == [[1.0] * (index + 1) for index in range(7)]
    assert trace.entropy == pytest.approx([torch.tensor(index + 1.0).log().item() for index in range(7)], abs=1e-6)
    assert trace.sources[3] == ["embedding", "attention 0", "mlp 0", "attention 1"]


def test_entropies_and_geometry_are_those_of_the_tokens_weights_and_sources():
    model = make("full")
    model.residual.observer = values = Values()
    forward(model)
    model.residual.observer = None
    with record(model, tokens=True) as trace:
        forward(model)
    weights, outputs = trace.token_weights[-1], torch.stack(values.outputs)
    entropy = -(weights * weights.log()).sum(-1).mean().item()
    assert trace.entropy[-1] == pytest.approx(entropy, rel=1e-5)
    rms = outputs.square().mean((1, 2, 3)).sqrt().tolist()
    assert trace.source_rms[-1] == pytest.approx(rms, rel=1e-5)
    query = model.residual.query[-1] * model.residual.gain[-1]
    cosines = torch.cosine_similarity(outputs, query, -1).mean((1, 2)).tolist()
    assert trace.source_cosine[-1] == pytest.approx(cosines, rel=1e-4, abs=1e-6)
    between = torch.cosine_similarity(outputs[2], outputs[4], -1).mean().item()
    assert trace.key_cosine[2][4] == trace.key_cosine[4][2] == pytest.approx(between, rel=1e-4, abs=1e-6)
    norms = values.reads[3].square().mean(-1).sqrt()
    torch.testing.assert_close(trace.token_norms[..., 3], norms)


def test_weights_by_label_are_means_over_the_tokens_with_it():
    model = make("block", num_blocks=2)
    labels = torch.randint(-1, 3, (2, 9), generator=torch.Generator().manual_seed(5))
    with record(model, tokens=True, labels=4) as trace:
        trace.label(labels)
        forward(model)
    assert trace.label_tokens.tolist() == [*((labels == k).sum().item() for k in range(3)), 0]
    for index, weights in enumerate(trace.token_weights):
        for k in range(3):
            expected = weights[labels == k].mean(0).tolist()
            assert trace.label_weights[index][k] == pytest.approx(expected, rel=1e-5)
    assert all(bool((rows[3] != rows[3]).all()) for rows in trace.label_weights)


def test_labels_that_do_not_fit_are_refused():
    model = make("full")
    with record(model, labels=2) as trace:
        with pytest.raises(UserError, match="call trace"):
            forward(model)
        with pytest.raises(UserError, match="label 2 in a recording of 2"):
            trace.label(torch.full((2, 9), 2))
        trace.label(torch.zeros(2, 4, dtype=torch.long))
        with pytest.raises(UserError, match="labels for 8 of the pass's 18"):
            forward(model)
        trace.label(torch.zeros(2, 9, dtype=torch.long))
        forward(model)
        with pytest.raises(UserError, match="labels for none"):  # the last pass's are not used again
            forward(model)


def test_memory_does_not_grow_with_what_was_recorded():
    model = make("full")

    def held(trace):
        fields = [v for value in vars(trace).values() for v in (value if isinstance(value, list) else [value])]
        return sum(v.numel() for v in fields if torch.is_tensor(v)) + sum(v.numel() for v in trace._lengths.values())

    with record(model, labels=3) as trace, torch.no_grad():
        sizes = []
        for _ in range(3):
            trace.label(torch.zeros(2, 9, dtype=torch.long))
            forward(model)
            sizes.append(held(trace))
    assert sizes[0] == sizes[1] == sizes[2]


def test_layers_that_run_again_in_backward_are_recorded_once():
    model = make("block", num_blocks=2).train()
    with record(model) as plain:
        forward(model).square().mean().backward()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    with record(model) as again:
        forward(model).square().mean().backward()
    assert again.tokens == plain.tokens
    assert again.input_rms == pytest.approx(plain.input_rms)
    assert again.output_rms == pytest.approx(plain.output_rms)
    assert again.grad_rms == pytest.approx(plain.grad_rms, rel=1e-4)


@pytest.mark.parametrize("residual", ["standard", "block", "full"])
def test_routing_weights_can_be_asked_of_the_model(residual):
    model = make(residual)
    with record(model, tokens=True) as trace:
        out = model(input_ids=some_ids(), use_cache=False, output_routing_weights=True)
    assert len(out.routing_weights) == 7
    assert all(torch.equal(a, b) for a, b in zip(out.routing_weights, trace.token_weights))
    assert torch.equal(out.logits, forward(model))
    assert model.residual.observer is None


@pytest.mark.parametrize("residual", crossed(WEIGHED))
def test_layers_that_run_again_in_backward_do_so_when_nobody_looks(residual):
    model = make(residual).train()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(
        {"use_reentrant": False}
    )
    grads = []
    for asked in (True, False):
        model.zero_grad()
        model(input_ids=some_ids(), use_cache=False, output_routing_weights=asked).logits.square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-7, msg=name)


def test_asking_a_residual_without_weights_for_them_says_so():
    model = make("deepnorm")
    with pytest.raises(UserError, match="weighs no sources"):
        model(input_ids=some_ids(), output_routing_weights=True)
    assert model.residual.observer is None


class Editing(Editor):
    """An editor that changes nothing, or the weights of one read."""

    def __init__(self, change=lambda index, weights: weights):
        self.change = change

    def on_start(self, embedding):
        self.outputs = [embedding]

    def on_write(self, index, output):
        self.outputs.append(output)

    def edit(self, read, weights):
        return self.change(read, weights)


EVERY = [(name, SETTINGS.get(name, {})) for name in WEIGHED] + GATED


@pytest.mark.parametrize(("residual", "settings"), EVERY)
def test_an_editor_that_changes_nothing_changes_nothing(residual, settings):
    model = make(residual, **settings)
    expected = forward(model)
    model.residual.editor = Editing()
    torch.testing.assert_close(forward(model), expected, rtol=1e-4, atol=1e-5)
    model.residual.editor = None
    assert torch.equal(forward(model), expected)


def factor_of(model, settings):
    """What read 4 multiplies its sum by: the number of its sources, and its share beside the plain stream."""
    own, factor = dict(model.residual.named_parameters()), 1.0
    if settings.get("read_scale") == "sum":
        factor *= 4 if settings.get("null_source") else 3  # embedding, block 1, partial
    if "gate" in settings:
        factor *= own["gates.gate"][4].sigmoid()
    return factor * own["gates.alpha"][4] if "alpha" in settings else factor


@pytest.mark.parametrize(("residual", "settings"), EVERY)
@torch.no_grad()
def test_an_edited_read_is_the_read_less_what_was_taken_out(residual, settings):
    """Half of the second source's weight goes: the read loses half of that source, times its weight and factor."""
    model = make(residual, **settings)

    def run(editor):
        model.residual.editor, model.residual.observer = editor, (reads := Values())
        forward(model)
        model.residual.editor = model.residual.observer = None
        return reads

    def halve(index, weights):
        return weights / torch.tensor([1, 2, *[1] * (weights.shape[1] - 2)]) if index == 4 else weights

    before, after = run(Editing()), run(Editing(halve))
    assert all(torch.equal(a, b) for a, b in zip(after.reads[:4], before.reads[:4]))
    weights, sources = before.sources[4]
    lost = factor_of(model, settings) * weights[:, 1].view(2, 9, 1) / 2 * (sources or before.outputs)[1]
    assert lost.abs().max() > 1e-4
    torch.testing.assert_close(after.reads[4], before.reads[4] - lost, rtol=1e-6, atol=1e-6)
    assert torch.equal(after.sources[4][0], halve(4, weights))


def test_deepnorm_cannot_be_edited():
    model = make("deepnorm")
    model.residual.editor = Editing()
    with pytest.raises(UserError, match="nothing to edit"):
        forward(model)


def test_plain_torch_shows_the_same_weights():
    """Block's reads of both phases, of several texts at once: what opens a block has no open sources."""
    model = make("block", block_size=2).eval()
    with torch.no_grad(), record(model, tokens=True) as kernels:
        forward(model)
    with torch.no_grad(), plain_torch(), record(model, tokens=True) as plain:
        forward(model)
    for a, b in zip(plain.token_weights, kernels.token_weights, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_a_model_that_calls_the_verbs_itself_is_recorded_and_edited(residual):
    """As the README's: nothing stands between its loop and the residual. Against the formula of its own reads."""
    torch.manual_seed(0)
    depth, width = 4, 8
    parts = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
    norm = Norm(torch.ones(width))

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.residual = parts, make_residual(residual, depth, width)

        def forward(self, x):
            state = self.residual.start(x)
            for index, part in enumerate(self.parts):
                h, state = self.residual.read(state, index, norm)
                state = self.residual.write(state, index, part(h).tanh())
            return self.residual.finish(state, norm)

    model, x = Own(), torch.randn(2, 5, width)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn_like(parameter))
    plain = model(x)
    with record(model) as trace:
        seen = model(x)
        seen.square().mean().backward()
    assert torch.equal(seen, plain) and trace.tokens == 10
    for row, contribution, rms in zip(trace.weights, trace.contribution, trace.output_rms + [1.0], strict=True):
        assert sum(row) == pytest.approx(len(row) if residual == "standard" else 1.0, rel=1e-5)
        assert sum(contribution) == pytest.approx(1.0, rel=1e-4) and 0 < rms <= 1
    assert len(trace.grad_rms) == depth and all(0 < one < 10 for one in trace.grad_rms)
    with intervene(model, Ablate("embedding", reads=[2])):
        assert not torch.allclose(model(x), plain, atol=1e-3)
    assert torch.equal(model(x), plain)
