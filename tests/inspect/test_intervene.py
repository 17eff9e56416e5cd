"""Edits change the weights that were named, by their formulas, and nothing else."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sample_mechanisms import WEIGHED, crossed
from tiny import SIZE
from torch.utils._pytree import tree_leaves

from attnres import UserError
from attnres.inspect.edits import Ablate, ActiveEdits, Reweigh, intervene, source_names
from attnres.inspect.recording import record
from attnres.models import build

SOFTMAX = ("block", "full", "cumulative", "boundary")


def make(residual, seed=1, **settings):
    model = build(SIZE, residual, vocab_size=50, max_positions=32, settings=settings).eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # The residual's last, so that the other weights are the same whatever it has.
        for _, parameter in sorted(model.named_parameters(), key=lambda pair: "residual" in pair[0]):
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=g))
    return model


def ids_of(batch=2, length=9):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits_of(model, ids=None):
    return model(input_ids=ids_of() if ids is None else ids, use_cache=False).logits


def token_weights(model, *edits, ids=None):
    with record(model, tokens=True) as trace, intervene(model, *edits):
        logits_of(model, ids)
    return trace


def test_a_read_that_no_edit_touches_keeps_its_kernel(monkeypatch):
    model, plainly, edit = make("full"), [], Ablate("embedding", reads="mlp 1")
    with monkeypatch.context() as all_plain, intervene(model, edit):
        all_plain.setattr(ActiveEdits, "edits", lambda self, index: True)
        expected = logits_of(model)
    own = type(model.residual)._read_plainly
    monkeypatch.setattr(type(model.residual), "_read_plainly", lambda *args: plainly.append(args[2]) or own(*args))
    with intervene(model, edit):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-5)
    assert plainly == [3]


@pytest.mark.parametrize("residual", crossed(WEIGHED))
def test_an_intervention_without_edits_gives_the_models_own_logits_and_gradients(residual):
    model = make(residual)
    for size in (1, 9):
        ids = ids_of(length=size)
        expected = logits_of(model, ids)
        with intervene(model):
            torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-5, atol=1e-5)
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with intervene(model):
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    for parameter, grad in zip(model.parameters(), grads):
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("residual", crossed(WEIGHED))
def test_an_edit_changes_later_logits_only_while_the_block_runs(residual):
    model = make(residual)
    expected = logits_of(model)
    source = source_names(model)[-1][-1]
    with intervene(model, Ablate(source, reads="output")):
        assert not torch.allclose(logits_of(model), expected, atol=1e-3)
    assert torch.equal(logits_of(model), expected)


def test_a_knock_out_leaves_the_others_in_their_proportions():
    model = make("full")
    own = token_weights(model).token_weights
    edited = token_weights(model, Ablate("mlp 0", reads="output")).token_weights
    place = source_names(model)[-1].index("mlp 0")
    expected = own[-1].clone()
    expected[..., place] = 0
    torch.testing.assert_close(edited[-1], expected / expected.sum(-1, keepdim=True))
    assert all(torch.allclose(a, b) for a, b in zip(edited[:-1], own[:-1]))
    raw = token_weights(model, Ablate("mlp 0", reads="output", renormalise=False)).token_weights
    torch.testing.assert_close(raw[-1], expected)


def test_a_knock_out_at_all_reads_and_of_several_sources():
    trace = token_weights(make("full"), Ablate(["embedding", "mlp 1"]))
    for names, weights in zip(trace.sources, trace.token_weights):
        for i, name in enumerate(names):
            assert (weights[..., i].abs().max() == 0) == (name in ("embedding", "mlp 1"))
        if len(names) > 1:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9))


def test_a_knock_out_of_a_plain_residual_subtracts_that_output():
    model = make("standard")
    outputs = {}
    for k, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda _, a, out, k=k: outputs.update({2 * k: out[0]}))
        layer.mlp.register_forward_hook(lambda _, a, out, k=k: outputs.update({2 * k + 1: out}))
    with intervene(model, Ablate("mlp 1", reads="output")):
        edited = logits_of(model)
    total = model.model.embed_tokens(ids_of()) + sum(outputs.values())
    norm = model.model.norm
    expected = model.lm_head(F.rms_norm(total - outputs[3], (32,), norm.weight, norm.variance_epsilon))
    torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-4)


def test_without_its_only_source_a_read_is_zero():
    model = make("block", block_size=2)
    trace = token_weights(model, Ablate("embedding", reads="attention 0"))
    assert trace.token_weights[0].abs().max() == 0
    assert trace.token_norms[..., 0].max() == 0
    assert torch.isfinite(trace.token_norms).all()


@pytest.mark.parametrize("residual", ["standard", "denseformer", "hyper_connections"])
def test_without_the_embedding_nothing_is_left_and_no_rounding_takes_its_place(residual):
    model = make(residual)
    trace = token_weights(model, Ablate("embedding"))
    assert trace.token_norms.max() == 0  # a sublayer of zeros without biases gives zeros, to the end
    some = token_weights(model, Ablate("embedding", tokens=[0]))
    torch.testing.assert_close(some.token_norms[:, 1:, 0], token_weights(model).token_norms[:, 1:, 0])


UNIFORM = Reweigh(lambda p, names: p.mean(-1, keepdim=True))


@pytest.mark.parametrize("residual", SOFTMAX)
def test_new_weights_are_what_the_function_makes_of_the_old(residual):
    model = make(residual)
    for weights in token_weights(model, UNIFORM).token_weights:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[-1]))
    newest = Reweigh(lambda p, names: torch.eye(len(names))[-1])
    for weights in token_weights(model, newest).token_weights:
        assert weights[..., -1].eq(1).all() and weights[..., :-1].eq(0).all()


@pytest.mark.parametrize("delta", [1.5, -2.0, 80.0, -80.0])
def test_a_function_is_given_the_names_of_the_sources(delta):
    model = make("full")
    own, place = token_weights(model).token_weights[-1], 3
    logits = own.double().log()
    logits[..., place] += delta
    name = source_names(model)[-1][place]

    def raised(p, names):
        return (p.log() + delta * torch.tensor([one == name for one in names])).softmax(-1)

    edited = token_weights(model, Reweigh(raised, reads=-1)).token_weights[-1]
    torch.testing.assert_close(edited, logits.softmax(-1).float(), rtol=1e-4, atol=1e-6)


def test_weights_of_a_recording_change_nothing_and_another_texts_weights_are_used():
    model = make("block", block_size=2)
    expected = logits_of(model)
    trace = token_weights(model)
    each = [Reweigh(lambda p, _, row=row: row, reads=i) for i, row in enumerate(trace.token_weights)]
    with intervene(model, *each):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
    other = ids_of(1, 5)
    means = [Reweigh(lambda p, _, row=row: row, reads=i) for i, row in enumerate(trace.weights)]
    for weights, mean in zip(token_weights(model, *means, ids=other).token_weights, trace.weights):
        torch.testing.assert_close(weights, torch.tensor(mean, dtype=torch.float32).expand(1, 5, -1))
    with pytest.raises(UserError, match=r"\(2, 9, 1\): expected numbers for \(1, 5, 1\)"), intervene(model, *each):
        logits_of(model, other)


def test_new_weights_of_one_read_and_of_some_tokens():
    model = make("block", block_size=4)
    own = token_weights(model).token_weights
    weights = token_weights(model, Reweigh(lambda p, names: [0.25, 0.75], "mlp 1", tokens=[2, -1])).token_weights
    torch.testing.assert_close(weights[3][:, [2, 8]], torch.tensor([0.25, 0.75]).expand(2, 2, 2))
    torch.testing.assert_close(weights[3][:, 3:8], own[3][:, 3:8])


@pytest.mark.parametrize("residual", ["full", "standard"])
def test_rows_of_a_batch_take_edits_of_their_own(residual):
    model = make(residual)
    ids = ids_of(1, 9).expand(3, 9)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    first, second = mask.clone(), mask.clone()
    first[0] = True
    second[1, 4:] = True
    edits = Ablate("mlp 0", 5, tokens=first), Ablate("embedding", 3, tokens=second)
    with intervene(model, *edits):
        together = logits_of(model, ids)
    with intervene(model, Ablate("mlp 0", 5)):
        torch.testing.assert_close(together[:1], logits_of(model, ids[:1]), rtol=1e-4, atol=1e-4)
    with intervene(model, Ablate("embedding", 3, tokens=range(4, 9))):
        torch.testing.assert_close(together[1:2], logits_of(model, ids[:1]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[2:], logits_of(model, ids[:1]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1, :4], together[2, :4], rtol=1e-4, atol=1e-4)


def test_numpys_numbers_are_numbers():
    model = make("full")
    with intervene(model, Ablate("embedding", np.int64(5), tokens=np.arange(3, 6))):
        edited = logits_of(model)
    with intervene(model, Ablate("embedding", 5, tokens=[3, 4, 5])):
        assert torch.equal(logits_of(model), edited)


def test_edits_are_made_in_turn():
    model = make("full")
    weights = token_weights(model, Reweigh(UNIFORM.function, "output"), Ablate("embedding", "output")).token_weights[-1]
    torch.testing.assert_close(weights, torch.tensor([0.0] + [1 / 6] * 6).expand(2, 9, 7))


@pytest.mark.parametrize("residual", ["block", "standard"])
def test_cached_generation_is_edited_as_uncached(residual):
    model = make(residual)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids_of(1), **options)
    with intervene(model, Ablate("embedding"), Reweigh(lambda p, names: p.sqrt(), "output")):
        cached = model.generate(ids_of(1), **options)
        uncached = model.generate(ids_of(1), use_cache=False, **options)
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached, plain)
    with intervene(model, Ablate("embedding", tokens=[3])):
        with pytest.raises(UserError, match="use_cache=False"):
            model.generate(ids_of(1), **options)
        model.generate(ids_of(1), use_cache=False, **options)


def test_a_cache_is_seen_however_it_goes_in():
    model, new = make("block"), ids_of(1, length=1)
    with torch.no_grad(), intervene(model, Ablate("embedding", tokens=[0])):
        cache = model(input_ids=ids_of(1), use_cache=True).past_key_values
        for call in (
            lambda: model.base_model(input_ids=new, past_key_values=cache),
            lambda: model.base_model(new, None, None, cache),
            lambda: model(new, None, None, cache),
        ):
            with pytest.raises(UserError, match="use_cache=False"):
                call()
        model.base_model(input_ids=new, use_cache=False)


@pytest.mark.parametrize("residual", ["hyper_connections", "mhc", "ddl"])
def test_nothing_of_a_pass_stays_when_the_last_watcher_leaves(residual):
    """These keep what streams are made of beside the state, with the graph where it is edited."""
    model = make(residual)

    def kept():
        own = {name: value for name, value in vars(model.residual).items() if name not in ("_parameters", "_buffers")}
        return [leaf for leaf in tree_leaves(own) if torch.is_tensor(leaf)]

    with record(model), intervene(model, Ablate("embedding")):
        model(input_ids=ids_of(), labels=ids_of())
        assert kept(), "an edit needs them while it lasts"
    assert not kept()
    copy.deepcopy(model)
    with record(model):
        logits_of(model)
    assert not kept()


def test_a_model_is_whole_again_after_an_exception_and_is_not_edited_twice():
    model = make("full")
    with pytest.raises(ZeroDivisionError), intervene(model, UNIFORM):
        raise ZeroDivisionError
    with intervene(model), pytest.raises(UserError, match="edited already"), intervene(model):
        pass
    assert model.residual.editor is None and not model._forward_pre_hooks


@pytest.mark.long
def test_source_names_are_those_that_a_recording_sees():
    for residual in WEIGHED:
        model = make(residual)
        assert source_names(model) == token_weights(model).sources


@pytest.mark.parametrize(
    ("residual", "edit", "message"),
    [
        ("block", Ablate("attention 1", "mlp 2"), "'attention 1' is no source of its own but inside 'block 1': "),
        ("block", Ablate("attention 2", "mlp 2"), "inside 'partial': 'mlp 2' reads embedding, block 1, partial"),
        ("cumulative", Ablate("mlp 0", "mlp 1"), "inside 'state 2' and 'stream'"),
        ("boundary", Ablate("mlp 0", "output"), "inside 'block 1': 'output' reads embedding, block 1"),
        ("boundary", Ablate("stream", "output"), "'attention 0' is the first that has it"),
        ("block", Ablate("block 1", "mlp 0"), "'attention 2' is the first that has it"),
        ("full", Ablate("mlp 2", [0, 1, "mlp 1"]), "is written after read 'mlp 1': choose a later read"),
        ("full", Ablate("mpl 1"), "did you mean 'mlp 1'"),
        ("full", Ablate([]), "no source is given"),
        ("full", Ablate("embedding", "mpl 1"), "unknown read 'mpl 1': did you mean 'mlp 1'"),
        ("full", Ablate("embedding", 7), "read 7: expected a name such as 'mlp 0', or a number from 0 to 6"),
        ("full", Ablate("embedding", []), "no reads are given"),
        ("full", Ablate("embedding", [3, "mlp 1"]), "a read is given twice in mlp 1, mlp 1"),
        ("full", Reweigh([0.5, 0.5], "output"), "expected a function"),
        ("full", "embedding", "'embedding' is no edit"),
        ("deepnorm", UNIFORM, "nothing to edit"),
    ],
)
def test_impossible_edits_are_refused_before_anything_runs(residual, edit, message):
    settings = {"block": {"block_size": 4}, "cumulative": {"block_size": 2}, "boundary": {"block_size": 6}}
    model = make(residual, **settings.get(residual, {}))
    with pytest.raises(UserError) as error, intervene(model, edit):
        pass
    assert message in str(error.value)
    assert model.residual.editor is None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Ablate("embedding", tokens=[9]), "position 9 in a text of 9 tokens: expected 0 to 8, or -1"),
        (
            Ablate("embedding", tokens=torch.zeros(3, 9, dtype=torch.bool)),
            r"shape \(3, 9\), the forward pass \(2, 9\)",
        ),
        (Reweigh(lambda p, names: p[..., 0], "output"), r"\(2, 9\): expected numbers for \(2, 9, 7\)"),
        (Reweigh(lambda p, names: "ab", "output"), "are str: expected numbers"),
    ],
)
def test_tokens_and_weights_that_a_pass_does_not_have_are_refused(edit, message):
    model = make("full")
    with intervene(model, edit), pytest.raises(UserError, match=message):
        logits_of(model)


def test_several_heads_take_an_edit_in_proportion_and_where_none_has_weight_alike():
    from attnres.residuals.mechanisms.weighting import _in_proportion

    weights = torch.tensor([[[0.2, 0.8, 0.0], [0.6, 0.4, 0.0]]])  # (token, heads, sources)
    before, after = weights.mean(1), torch.tensor([[0.2, 0.5, 0.3]], requires_grad=True)
    changed = _in_proportion(weights, before, after)
    assert changed.mean(1).tolist()[0] == pytest.approx([0.2, 0.5, 0.3])
    torch.testing.assert_close(changed[0, :, 0] / weights[0, :, 0], torch.full((2,), 0.5))
    assert changed[0, :, 2].tolist() == pytest.approx([0.3, 0.3])
    changed.sum().backward()
    assert after.grad.isfinite().all() and after.grad.tolist()[0] == pytest.approx([2.0, 2.0, 2.0])
    assert torch.equal(_in_proportion(weights, before, before.clone()), weights)
