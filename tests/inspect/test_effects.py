"""An effect is the difference of two runs, nothing more; over a corpus its error is over documents."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import SIZE
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from attnres import UserError
from attnres.inspect.edits import Ablate, Reweigh, intervene
from attnres.inspect.effects import effect, predict
from attnres.inspect.subject import token_id
from attnres.inspect.survey import corpus_effect
from attnres.models import build

EDIT = Ablate("mlp 0", reads=["mlp 1", "output"])


def make(residual="full"):
    model = build(SIZE, residual, vocab_size=50, max_positions=32).eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=g))
    return model


def text(length=12, seed=0):
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def losses(model, ids):
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none"), logits


@pytest.mark.parametrize("residual", ["full", "standard"])
def test_losses_divergence_and_distribution_are_those_of_the_two_runs(residual):
    model, ids = make(residual), text()
    before, plain = losses(model, ids)
    with intervene(model, EDIT):
        after, edited = losses(model, ids)
    result = effect(model, ids, EDIT, top=4)
    assert result.loss_before == pytest.approx(before.tolist(), abs=1e-5)
    assert result.loss_after == pytest.approx(after.tolist(), abs=1e-4)
    change = (after - before).double()
    assert result.difference == pytest.approx(change.mean().item(), abs=1e-4)
    assert result.error == pytest.approx(change.std().item() / 11**0.5, rel=1e-3)
    p, q = plain.double().softmax(-1), edited.double().softmax(-1)
    assert result.kl == pytest.approx((p * (p / q).log()).sum(-1).tolist(), abs=1e-4)
    assert min(result.kl) > 0
    assert len(result.top) == 4
    for token in result.top:
        assert token["before"] == pytest.approx(p[-1, token["id"]].item(), abs=1e-5)
        assert token["after"] == pytest.approx(q[-1, token["id"]].item(), abs=1e-5)
    listed = {token["id"] for token in result.top}
    assert {p[-1].argmax().item(), q[-1].argmax().item()} <= listed
    json.dumps(result.to_dict(), allow_nan=False)


def test_no_edit_has_no_effect():
    change = effect(make(), text(), [])
    assert change.difference == pytest.approx(0, abs=1e-5)
    assert change.kl == pytest.approx([0.0] * 12, abs=1e-5)


def test_a_known_prediction_is_not_made_again():
    model, ids = make(), text()
    first = effect(model, ids, EDIT)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    change = effect(model, ids.unsqueeze(0), EDIT, before=first.before)
    assert change.to_dict() == first.to_dict() and len(passes) == 1
    with pytest.raises(UserError, match="is of another text"):
        effect(model, text(seed=5), EDIT, before=first.before)


def test_dropout_plays_no_part_and_training_mode_comes_back():
    model = make().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(predict(model, text()).log_probs, predict(model, text()).log_probs)
    assert model.training


def test_one_token_has_a_distribution_and_no_loss():
    change = effect(make(), [3], Reweigh(lambda p, names: p))
    assert (change.loss_before, change.difference, change.error) == ([], None, None)
    assert len(change.kl) == 1 and len(change.top) == 10


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "text is empty"),
        ([1] * 33, "33 tokens and the model takes 32"),
        ([1, 50], "token id 50, and the embedding of the model has 50 rows"),
        ([-1, 4], "token id -1"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([0.5], "expected whole numbers"),
    ],
)
def test_texts_that_cannot_be_run_are_refused(ids, message):
    with pytest.raises(UserError, match=message):
        effect(make(), ids, EDIT)


def test_over_a_corpus_the_change_is_that_of_every_token_and_its_error_over_documents():
    model = make()
    documents = [text(length, seed=length) for length in (12, 5, 2, 9, 1, 7)]

    def labels(ids):
        return (ids < 25).long()

    change = corpus_effect(model, iter(documents), EDIT, batch_size=2, labels=labels, label_names=["large", "small"])
    changes, marks = [], []
    for ids in documents:
        alone = effect(model, ids, EDIT)
        changes.append(np.subtract(alone.loss_after, alone.loss_before))
        marks.append(labels(ids)[:-1].numpy())
    assert (change.change.items, change.change.total) == (5, 30)
    for mean, rows in (
        (change.change, changes),
        (change.labels["large"], [row[mark == 0] for row, mark in zip(changes, marks)]),
        (change.labels["small"], [row[mark == 1] for row, mark in zip(changes, marks)]),
    ):
        rows = [row for row in rows if len(row)]
        everything = np.concatenate(rows)
        assert mean.total == len(everything) and mean.mean == pytest.approx(everything.mean(), abs=1e-5)
        left = [row.sum() - everything.mean() * len(row) for row in rows]
        error = np.sqrt(len(rows) / (len(rows) - 1) * np.square(left).sum()) / len(everything)
        assert mean.error == pytest.approx(error, rel=1e-3)
    assert change.after - change.before == pytest.approx(change.change.mean, abs=1e-6)


def test_a_corpus_of_nothing_and_labels_without_names_are_refused():
    model = make()
    with pytest.raises(UserError, match="no document has two tokens"):
        corpus_effect(model, [[1], [2]], EDIT)
    with pytest.raises(UserError, match="label_names"):
        corpus_effect(model, [[1, 2, 3]], EDIT, labels=lambda ids: [0, 1, 2], label_names=["a"])
    with pytest.raises(UserError, match="batch_size is 0"):
        corpus_effect(model, [[1, 2, 3]], EDIT, batch_size=0)


def test_letters_that_the_tokenizer_does_not_know_are_refused():
    model = make()
    model.read_tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"hello": 0})))
    assert predict(model, "hello").ids.tolist() == [0] and token_id(model, "hello") == 0
    for ask in (predict, token_id):
        with pytest.raises(UserError, match="the tokenizer cannot encode the text"):
            ask(model, "bye")
