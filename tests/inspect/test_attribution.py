"""Knock-outs of all edges are those made one by one, and the gradient's estimate is their first order."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from tiny import SIZE

from attnres import UserError
from attnres.inspect.attribution import Change, agreement, attribute, each_alone, spearman
from attnres.inspect.edits import Ablate, Reweigh, intervene, source_names
from attnres.inspect.recording import record
from attnres.models import build
from attnres.residuals.mechanisms import depth_attention
from attnres.residuals.mechanisms.weighting import Weighting

LAYOUTS = ["block", "full", "cumulative", "boundary", "standard", "rescaled", "denseformer", "hyper_connections"]


def make(residual, seed=1):
    settings = {"block_size": 2} if residual == "block" else {}
    model = build(SIZE, residual, vocab_size=50, max_positions=32, settings=settings).eval().double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=g))
    return model


def text(length=8):
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def log_probability(model, ids, target, *edits):
    with intervene(model, *edits):
        return model(input_ids=ids[None], use_cache=False).logits[0, -1].double().log_softmax(-1)[target].item()


def part(model, whole, share, scale):
    """Return a share of an ablation, the edited read at a given length: p + share (scale p' - p), scale (T, 1)."""
    softmax = model.residual.traits.sums_to_one

    def weights(p, names):
        return p + share * (scale * whole.reweigh(p, names, softmax) - p)

    return Reweigh(weights, reads=whole.reads)


def lengths(model, ids, index, *edits):
    """(T,) of the read `index`."""
    with intervene(model, *edits), record(model, tokens=True) as trace, torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    return trace.token_norms[0, :, index]


@pytest.mark.quick("block", "boundary")
@pytest.mark.parametrize("residual", LAYOUTS)
def test_the_gradient_is_the_first_order_of_the_knock_out(residual):
    model, ids = make(residual), text()
    attribution = attribute(model, ids)
    names = source_names(model)
    assert attribution.sources == names
    share = 3e-3  # Transformers' own norms and softmax are fp32 here
    for index in (1, 3, 4, 6):
        for source, estimate in zip(names[index], attribution.gradient[index]):
            whole = Ablate(source, reads=index)
            # On both sides of zero: what is of second order cancels.
            scale = torch.ones(len(ids), 1)
            if (residual != "boundary" or index == 6) and len(names[index]) > 1:  # a norm alone follows
                scale[:, 0] = lengths(model, ids, index) / lengths(model, ids, index, whole)
            more = log_probability(model, ids, attribution.target, part(model, whole, share, scale))
            less = log_probability(model, ids, attribution.target, part(model, whole, -share, scale))
            assert estimate == pytest.approx((more - less) / (2 * share), rel=2e-3, abs=3e-4)


@pytest.mark.quick("block")
@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_knock_outs_in_batches_are_those_made_one_by_one(residual):
    model, ids = make(residual), text()
    attribution = attribute(model, ids, batch_size=5)
    plain = log_probability(model, ids, attribution.target)
    assert attribution.log_probability == pytest.approx(plain, abs=1e-6)
    for index, (names, row) in enumerate(zip(attribution.sources, attribution.knockout)):
        for source, change in zip(names, row):
            edited = log_probability(model, ids, attribution.target, Ablate(source, reads=index))
            assert change == pytest.approx(edited - plain, abs=1e-5)


def test_edges_at_the_predicted_position_alone():
    model, ids = make("full"), text()
    attribution = attribute(model, ids, everywhere=False)
    plain = log_probability(model, ids, attribution.target)
    edited = log_probability(model, ids, attribution.target, Ablate("mlp 0", reads=4, tokens=[-1]))
    assert attribution.knockout[4][2] == pytest.approx(edited - plain, abs=1e-5)
    everywhere = attribute(model, ids)
    # After the last attention no token reads another: there both are the same.
    assert attribution.knockout[5] == pytest.approx(everywhere.knockout[5], abs=1e-5)
    assert attribution.gradient[6] == pytest.approx(everywhere.gradient[6], abs=1e-5)
    assert attribution.gradient[2] != pytest.approx(everywhere.gradient[2], abs=1e-5)


@pytest.mark.parametrize("source", ["embedding", "mlp 0"])
def test_a_source_with_nearly_all_the_weight_is_no_longer_overrated(source):
    """A read a hundred times as long without its main source is, behind the norm, no longer."""
    model, ids = make("full"), text()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.01)
        model.residual.query[2].zero_()
    attribution = attribute(model, ids)
    row = dict(zip(attribution.sources[2], zip(attribution.knockout[2], attribution.gradient[2])))
    assert abs(row[source][1]) < 3 * abs(row[source][0]) + 0.5


def test_the_target_is_what_follows_or_else_what_the_model_says():
    model, ids = make("full"), text()
    inner = attribute(model, ids, position=3)
    assert (inner.position, inner.target) == (3, int(ids[4]))
    short = attribute(model, ids[:4], target=int(ids[4]))
    assert short.knockout == inner.knockout
    with torch.no_grad():
        top = int(model(input_ids=ids[None], use_cache=False).logits[0, -1].argmax())
    assert attribute(model, ids).target == top


def test_the_largest_edges_come_first_and_reads_without_a_choice_are_left_out():
    attribution = attribute(make("block"), text())
    assert attribution.sources[0] == ["embedding"]
    edges = attribution.top(1000)
    assert len(edges) == attribution.agreement.edges == sum(len(row) for row in attribution.sources) - 1
    assert [abs(e.knockout) for e in edges] == sorted((abs(e.knockout) for e in edges), reverse=True)
    by_gradient = attribution.top(3, by="gradient")
    assert abs(by_gradient[0].gradient) == max(abs(e.gradient) for e in edges)
    with pytest.raises(UserError, match="by is 'loss'"):
        attribution.top(by="loss")


def test_one_sources_removal_is_invisible_to_the_gradient():
    attribution = attribute(make("full"), text())
    assert attribution.gradient[0] == pytest.approx([0.0], abs=1e-4)
    assert abs(attribution.knockout[0][0]) > 1e-3


def test_it_is_written_as_json(tmp_path):
    attribution = attribute(make("full"), text())
    attribution.save(tmp_path / "edges.json")
    stored = json.loads((tmp_path / "edges.json").read_text())
    assert stored["knockout"] == attribution.knockout and stored["agreement"]["top"] == 10


def test_spearman_is_pearson_of_ranks_with_shared_ranks_for_ties():
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([1.0, 4, 9, 16])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([4.0, 3, 2, 1])) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])) == pytest.approx(4.5 / 22.5**0.5)
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) is None


def test_overlap_counts_the_largest_edges_of_both():
    a = np.array([9.0, -8, 1, 0.5, 0.1])
    b = np.array([-7.0, 0.1, 6, 0.2, 0.0])
    assert agreement(a, b, top=2).overlap == 0.5
    assert agreement(a, b).overlap == 1.0 and agreement(a, b).top == 5


def test_positions_targets_and_models_that_do_not_fit_are_refused():
    model = make("full")
    with pytest.raises(UserError, match="position 8 in a text of 8 tokens"):
        attribute(model, text(), position=8)
    with pytest.raises(UserError, match="target is 50"):
        attribute(model, text(), target=50)
    with pytest.raises(UserError, match="text is empty"):
        attribute(model, [])
    with intervene(model), pytest.raises(UserError, match="is being edited"):
        attribute(model, text())
    with pytest.raises(UserError, match="nothing to edit"):
        attribute(make("deepnorm"), text())
    assert model.residual.editor is None


def test_cuts_begin_at_their_layer_and_weigh_once_what_the_copies_share(monkeypatch):
    """Layers, sources that plain torch weighs and passes over the sources of a group of reads are counted."""
    model = build("pico", "full", vocab_size=50, max_positions=32).eval()
    ids, layers, weighed, passes = text()[None], [], [], []
    logit, read_sealed = Weighting._logit, depth_attention.read_sealed
    for layer in model.depth_layers:
        layer.mlp.register_forward_hook(lambda *args: layers.append(len(args[2])))
    monkeypatch.setattr(Weighting, "_logit", lambda *args: weighed.append(args[1].shape) or logit(*args))
    monkeypatch.setattr(depth_attention, "read_sealed", lambda *a, **k: passes.append(1) or read_sealed(*a, **k))
    count = len(model.depth_layers)
    tokens, read = torch.ones(8, dtype=torch.bool), 12
    cuts = [Change(read, tokens, partial(Ablate, source, read)) for source in source_names(model)[read][:3]]
    ((part, _),) = each_alone(model, ids, (), cuts, (0, None), 8, None)
    assert part == [0, 1, 2] and layers == [1] * count + [3] * (count - read // 2)
    assert weighed == [(1, 8, model.config.hidden_size)] * (read + 1)
    groups = [start for start, stop in dict.fromkeys(model.residual._groups)]
    # The first group has one source before it, the embedding, and takes no such pass.
    assert len(passes) == len(groups[1:]) + sum(start > read for start in groups)
