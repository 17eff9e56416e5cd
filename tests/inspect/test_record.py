"""Recording sees what the model really does, and changes nothing."""

import pytest
import torch

from attnres import RESIDUALS, depth_read_reference
from attnres.inspect import read_names, record
from attnres.models import build

SIZE = {
    "family": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def make(residual, **settings):
    model = build(SIZE, residual, vocab_size=50, max_positions=32, settings=settings)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=g))
    return model


def forward(model):
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("residual", sorted(RESIDUALS))
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


@pytest.mark.parametrize("residual", sorted(RESIDUALS))
def test_magnitudes_are_there_for_every_depth(residual):
    with record(model := make(residual)) as trace:
        forward(model).square().mean().backward()
    assert [len(values) for values in (trace.output_rms, trace.input_rms, trace.grad_rms)] == [6, 7, 6]
    assert all(value > 0 for values in (trace.output_rms, trace.input_rms, trace.grad_rms) for value in values)
    assert trace.tokens == 18
    reads_depth = residual in ("block", "full", "cumulative", "boundary", "boundary_normed")
    assert (trace.routing is None) != reads_depth


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
    assert trace.routing["reads"] == read_names(6)
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


def test_two_recordings_of_one_model_and_foreign_models_are_refused():
    model = make("full")
    with record(model), pytest.raises(ValueError, match="recorded already"), record(model):
        pass
    with pytest.raises(ValueError, match="no residual"), record(torch.nn.Linear(2, 2)):
        pass
