"""Stages in one process, one after the other: losses and gradients of the whole model, for every mechanism."""

from contextlib import nullcontext

import pytest
import torch
from sample_mechanisms import crossed
from tiny import SIZE

from attnres import UserError, make_residual
from attnres.head import called_losses
from attnres.models import build
from attnres.scale.cut import crossings, cut_of, placed
from attnres.scale.pipeline import plan_cut, refuse_schedule
from attnres.scale.stage import Collect, Entry, Lend, RankCache, StageModule, refuse_stages, shell
from attnres.streams.stream import Stream

FIVE = {**SIZE, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "gpt2": {"family": "gpt2", "n_embd": 16, "n_layer": 5, "n_head": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma2": {**FIVE, "family": "gemma2", "sliding_window": 3},
    "olmo2": {name: value for name, value in FIVE.items() if name != "head_dim"} | {"family": "olmo2"},
    "mixtral": {**FIVE, **MOE, "family": "mixtral"},
}
FAMILIES["gpt2"] |= {"resid_pdrop": 0.0}


def losses(model, call, y):
    return called_losses(model, call, y, "whole")


def cut_and_whole(residual, layers, size=FIVE, *, frozen=False, **settings):
    """(names whose gradients are missing on one side, largest relative error) of a cut over two ranks; `frozen`: the
    embedding is."""
    model = build(size, residual, vocab_size=31, max_positions=32, settings=settings).double().train()
    model.set_experts_implementation("eager")  # grouped products have no fp64
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter) * 0.2)
    model.get_input_embeddings().requires_grad_(not frozen)
    x, y = torch.randint(31, (2, 4), generator=draw), torch.randint(31, (2, 4), generator=draw)
    loss = losses(model, {"input_ids": x}, y)
    loss.sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)

    cut = cut_of(layers, placed(len(layers), 2), sublayers=len(model.residual.sublayers))
    table, caches = crossings(model.residual, cut), (RankCache(), RankCache())
    stages = [
        StageModule(shell(model), stage, cut, table, caches[rank], losses, nullcontext)
        for stage, rank in enumerate(cut.ranks)
    ]
    inputs, outputs, tensors = [], [], (x,)
    for stage in stages:
        inputs.append(tensors)
        outputs.append(stage(*tensors, microbatch=3, targets=y))
        if not stage.last:
            assert all(tensor._base is None for tensor in outputs[-1]), "a view is sent, which torch detaches in place"
            tensors = tuple(tensor.detach().requires_grad_() for tensor in outputs[-1])
            assert len(tensors) == len(table[stage.stage].sent)
    assert torch.allclose(outputs[-1], loss, rtol=1e-12)
    outputs[-1].sum().backward()
    for place in reversed(range(len(stages) - 1)):
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs[place + 1]]
        wanting = [pair for pair in zip(outputs[place], gradients, strict=True) if pair[0].requires_grad]
        if wanting:
            torch.autograd.backward(*zip(*wanting, strict=True))
    for cache in caches:
        cache.check()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    errors = ((ours[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-30) for n in wanted if n in ours)
    return set(ours) ^ set(wanted), max(errors).item()


@pytest.mark.parametrize("residual", crossed())
def test_every_mechanism_is_cut_without_a_trace(residual):
    missing, error = cut_and_whole(residual, (1, 2, 1, 1))
    assert not missing and error < 1e-10


@pytest.mark.parametrize(
    ("residual", "settings"),
    [
        ("compose", {"rules": "muddformer=-2:"}),
        ("compose", {"rules": "block=0:3+muddformer=-2:"}),
        ("block", {"block_size": 6, "summaries": "split", "count_power": 0.5, "count_prior": "learned"}),
        ("block", {"block_size": 4, "block_scale": True}),
        ("full", {"embedding_key": "static"}),
    ],
)
def test_settings_are_cut_without_a_trace(residual, settings):
    missing, error = cut_and_whole(residual, (1, 2, 1, 1), **settings)
    assert not missing and error < 1e-10


@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_are_cut_without_a_trace(family):
    missing, error = cut_and_whole("block", (1, 2, 1, 1), FAMILIES[family], block_size=3)
    assert not missing and error < 1e-10


@pytest.mark.parametrize("layers", [(0, 3, 2, 0), (2, 3), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("tie", [True, False])
def test_uneven_cuts_ends_of_their_own_and_tied_tables(layers, tie):
    missing, error = cut_and_whole("block", layers, {**FIVE, "tie_word_embeddings": tie}, block_size=3)
    assert not missing and error < 1e-10


@pytest.mark.parametrize("layers", [(0, 3, 2, 0), (1, 2, 1, 1)])
def test_a_frozen_embedding_is_owed_nothing(layers):
    size = {**FIVE, "tie_word_embeddings": False}
    missing, error = cut_and_whole("block", layers, size, frozen=True, block_size=3)
    assert not missing and error < 1e-10


@torch.no_grad()
def test_a_pass_without_gradients_is_cut_too():
    """In fp32, where the whole model's pass without gradients keeps its sources in a bank that cannot be cut."""
    model = build(FIVE, "block", vocab_size=31, settings={"block_size": 3})
    x, y = torch.randint(31, (2, 4)), torch.randint(31, (2, 4))
    cut = cut_of((2, 1, 2), placed(3, 2))
    table, caches, tensors = crossings(model.residual, cut), (RankCache(), RankCache()), (x,)
    for stage, rank in enumerate(cut.ranks):
        tensors = StageModule(shell(model), stage, cut, table, caches[rank], losses, nullcontext)(*tensors, targets=y)
    torch.testing.assert_close(tensors, losses(model, {"input_ids": x}, y))


def halved(gradients, ctx):
    ones = [None if gradient is None else gradient / 2 for gradient in gradients]
    return WHOLE_LEND(ctx, *ones)


WHOLE_LEND = Lend.backward


@pytest.mark.parametrize(
    ("place", "name", "fault", "said"),
    [
        (RankCache, "owe", lambda *_: None, "1e-10"),
        (Lend, "backward", staticmethod(lambda ctx, *gradients: halved(gradients, ctx)), "1e-10"),
        (
            Entry,
            "__call__",
            lambda entry, layer, args, kwargs: ((Stream.plain(entry.residual, args[0]),), kwargs),
            "2 sublayers and not 6",
        ),
        (
            Collect,
            "forward",
            staticmethod(lambda ctx, cache, number, names, *tensors: tuple(t[:] for t in tensors)),
            "a view is sent",
        ),
    ],
    ids=["a lost deposit", "shared gradients divided again", "layer 0 begins a stream of its own", "a view is sent"],
)
def test_planted_faults_are_seen(monkeypatch, place, name, fault, said):
    """By what the tests above hold of a cut."""
    if place is Entry:
        begin = StageModule._take_apart

        def take_apart(stage, model, cut):
            begin(stage, model, cut)
            stage.entry.residual = stage.residual

        monkeypatch.setattr(StageModule, "_take_apart", take_apart)
    monkeypatch.setattr(place, name, fault)
    with pytest.raises((AssertionError, TypeError, UserError), match=said):
        missing, error = cut_and_whole("block", (0, 2, 2, 1), block_size=3)
        assert not missing and error < 1e-10


def test_a_lost_gradient_is_noticed():
    cache = RankCache()
    cache.keep(0, "block 1", torch.ones(2))
    cache.owe(1, "block 2", torch.ones(2))
    with pytest.raises(RuntimeError, match=r"\{0: \['block 1'\]\}.*gradients owed \{1: \['block 2'\]\}"):
        cache.check()
    cache.check()  # and said once


def test_models_that_stages_cannot_be_made_of_are_refused():
    watched = build(FIVE, "block", vocab_size=31, settings={"num_blocks": 2})
    watched.residual.observer = object()
    with pytest.raises(UserError, match="cannot be watched"):
        refuse_stages(watched)
    with pytest.raises(UserError, match="value_residual"):
        refuse_stages(build(FIVE, "block", vocab_size=31, settings={"num_blocks": 2, "value_residual": "fixed"}))


def test_schedules_that_would_train_a_model_wrongly_are_refused():
    """A V of stages has both ends on one rank: each would have a copy of a sharded tied table, and one
    would never be trained. And a loss in parts hands out its gradients once, where zero bubbles ask twice."""
    tied, untied = (
        build(FIVE | {"tie_word_embeddings": tie}, "block", vocab_size=31, settings={"num_blocks": 2})
        for tie in (True, False)
    )
    ends = {name: plan_cut(tied, 2, name, 2) for name in ("zbv", "interleaved")}
    with pytest.raises(UserError, match="both ends of the model in one process, and a tied table"):
        refuse_schedule(tied, ends["zbv"], "zbv", shards=2, loss="whole")
    with pytest.raises(UserError, match="loss is chunked and the schedule interleaved_zero_bubble"):
        refuse_schedule(tied, ends["interleaved"], "interleaved_zero_bubble", shards=1, loss="chunked")
    refuse_schedule(tied, ends["zbv"], "zbv", shards=1, loss="whole")
    refuse_schedule(untied, ends["zbv"], "zbv", shards=2, loss="whole")
    refuse_schedule(tied, ends["interleaved"], "interleaved", shards=2, loss="chunked")


@pytest.mark.parametrize("residual", crossed())
def test_states_have_shapes_without_memory(residual, caplog):
    """What a plan asks of a model that is shapes alone."""
    with torch.device("meta"):
        mechanism = make_residual(residual, 10, 16)
    assert all(slot.name for index in range(1, 10) for slot in mechanism.slots(index))
    assert not caplog.records, "nothing is slower where nothing is computed"
