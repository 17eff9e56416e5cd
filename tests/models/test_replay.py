"""A pass that begins at a layer gives what the whole pass gives, of every mechanism and family, edited or not."""

import pytest
import torch
from sample_mechanisms import crossed
from test_families import IDS, families, stirred
from tiny import SIZE

from attnres.inspect import Ablate, intervene, read_vectors
from attnres.models import build
from attnres.models.replay import Replay

SETTINGS = {"block": {"block_size": 2}, "post_block": {"block_size": 2}}


def logits(model, ids, *edits):
    with torch.no_grad(), intervene(model, *edits):
        return model(input_ids=ids, use_cache=False).logits


def check(model, ids, reads):
    """Passes of two copies, in the second of which a source is knocked out, begun at each read and whole."""
    residual = model.residual.itself()
    replay = Replay(model, residual, lambda: model(input_ids=ids, use_cache=False))
    layout, calls = residual.layout(), []
    hooks = [layer.register_forward_pre_hook(lambda layer, args: calls.append(layer)) for layer in layers_of(model)]
    for read in reads:
        mask = torch.zeros(2, ids.shape[1], dtype=torch.bool)
        mask[1] = True
        edit = Ablate(layout[read].sources[-1].name, reads=read, tokens=mask)
        whole = logits(model, ids.expand(2, -1), edit)
        assert len(set(calls)) == len(hooks)
        calls.clear()
        with replay.begun(read, 2):
            torch.testing.assert_close(logits(model, ids.expand(2, -1), edit), whole, rtol=1e-4, atol=2e-5)
        begun = 0 if residual.watched_from_start else residual.places()[read][0] // len(residual.sublayers)
        assert len(set(calls)) == len(hooks) - begun
        calls.clear()
    for hook in hooks:
        hook.remove()
    assert residual.observer is None and not any("forward" in vars(layer) for layer in model.depth_layers)
    torch.testing.assert_close(logits(model, ids), logits(model, ids))


def layers_of(model):
    """A module that each layer calls once, whatever it puts out: where its first norm or sublayer is."""
    return [layer.get_submodule(model.family.reads[0]) for layer in model.depth_layers]


@pytest.mark.parametrize("residual", crossed())
def test_every_mechanism(residual):
    model = build(SIZE, residual, vocab_size=50, max_positions=32, settings=SETTINGS.get(residual, {})).eval()
    if not all(read.sources for read in model.residual.layout()):
        pytest.skip("it mixes by no weights, and nothing is edited")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    check(model, torch.randint(0, 50, (1, 7), generator=generator), range(0, len(model.residual.layout()), 2))


@pytest.mark.parametrize("settings", [{"value_residual": "layer"}, {"query": "input"}, {"null_source": True}])
def test_settings(settings):
    model = build(SIZE, "full", vocab_size=50, max_positions=32, settings=settings).eval()
    check(model, torch.arange(7)[None], (2, 5, 6))


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_every_family(family):
    model = stirred(family)
    check(model, IDS[:1], (len(model.residual.layout()) - 3, len(model.residual.layout()) - 1))


def test_what_is_watched_sees_the_earlier_outputs():
    """An editor of vectors that lie before the layer is given the text's own."""
    model, ids = build(SIZE, "full", vocab_size=50, max_positions=32).eval(), torch.arange(7)[None]
    kept = []

    class Look(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.outputs = []

        def on_start(self, embedding):
            self.outputs = [embedding]

        def on_write(self, index, output):
            self.outputs.append(output)

        def edits(self, read):
            return True

        def edit(self, read, weights):
            return weights

        def exchange(self, read, values):
            kept.append([one.clone() for one in self.outputs])
            return values

        def steer(self, read, h):
            return h

    vectors = read_vectors(model, ids)
    replay = Replay(model, model.residual, lambda: model(input_ids=ids, use_cache=False))
    model.residual.editor = Look()
    try:
        with replay.begun(4, 3), torch.no_grad():
            model(input_ids=ids.expand(3, -1), use_cache=False)
    finally:
        model.residual.editor = None
    assert len(kept[-1]) == len(vectors.outputs) == 7
    for output, expected in zip(kept[-1], vectors.outputs, strict=True):
        assert output.shape == (3, *expected.shape)
        torch.testing.assert_close(output[1], expected, rtol=1e-4, atol=1e-5)
