"""Continuations are scored exactly, however they are batched and padded."""

import copy
import math

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import GPT2Config, GPT2LMHeadModel

from attnres import UserError
from attnres.evals import scoring
from attnres.evals.scoring import (
    NO_ITEMS,
    OTHER_PLACES,
    OTHER_TOKENS,
    Request,
    TaskMeasure,
    cost,
    difference,
    encode_pairs,
    score,
    tokens_digest,
    windows,
)
from attnres.evals.tasks import wikitext
from attnres.models import open_checkpoint
from attnres.models.encoding import token_in_front

VOCAB = 300


@pytest.fixture(scope="module")
def loaded(folders):
    subject = open_checkpoint(folders["block"])
    return subject, subject.load()


def some_requests(count=25, seed=0, longest=30):
    g = torch.Generator().manual_seed(seed)

    def ids(least, most):
        size = int(torch.randint(least, most + 1, (1,), generator=g))
        return torch.randint(0, VOCAB, (size,), generator=g).tolist()

    return [Request(ids(1, longest), ids(1, 9)) for _ in range(count)]


def oracle(model, request, context):
    """One sequence, no padding, a softmax over the whole vocabulary in fp64."""
    ids = [*request.context, *request.continuation][-(context + 1) :]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
    n = len(request.continuation)
    rows = logits.log_softmax(1)[-n:]
    target = torch.tensor(ids[-n:])
    return rows[range(n), target].numpy(), (rows.argmax(1) == target).numpy()


@pytest.mark.parametrize("batch_tokens", [1, 60, 100_000])
def test_batches_change_no_number(loaded, batch_tokens):
    subject, model = loaded
    requests = some_requests()
    scores = score(model, requests, context=subject.context, batch_tokens=batch_tokens)
    for request, scored in zip(requests, scores, strict=True):
        logprobs, greedy = oracle(model, request, subject.context)
        np.testing.assert_allclose(scored.logprobs, logprobs, atol=1e-4)
        assert scored.greedy.tolist() == greedy.tolist()
        assert scored.total == pytest.approx(logprobs.sum(), abs=1e-4)


def test_a_model_whose_forward_computes_all_logits(loaded, monkeypatch):
    subject, model = loaded
    requests = some_requests(8)
    expected = score(model, requests, context=subject.context, batch_tokens=200)
    forward = model.forward

    def bare(input_ids, use_cache):
        return forward(input_ids=input_ids, use_cache=use_cache)

    monkeypatch.setattr(model, "forward", bare)
    scores = score(model, requests, context=subject.context, batch_tokens=200)
    for a, b in zip(expected, scores, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)


def test_learned_positions_and_a_bf16_model_are_scored_in_fp32():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
    requests = some_requests(10)
    for scored, request in zip(score(model, requests, context=32, batch_tokens=100), requests, strict=True):
        np.testing.assert_allclose(scored.logprobs, oracle(model, request, 32)[0], atol=1e-4)
    # A sum of bf16 log-probabilities over 300 words would be off by about 1e-2.
    low = model.bfloat16()
    for scored, request in zip(score(low, requests, context=32, batch_tokens=1), requests, strict=True):
        np.testing.assert_allclose(scored.logprobs, oracle(low, request, 32)[0], atol=1e-4)


def test_too_long_an_input_loses_tokens_on_the_left(loaded):
    subject, model = loaded
    long = Request(list(range(1, 200)), [5, 6, 7])
    (scores,) = score(model, [long], context=subject.context, batch_tokens=4096)
    np.testing.assert_allclose(scores.logprobs, oracle(model, long, subject.context)[0], atol=1e-4)
    with pytest.raises(ValueError, match="scores 70 tokens, the context is 64"):
        score(model, [Request([1], [2] * 70)], context=64, batch_tokens=4096)


def test_one_question_is_run_once(loaded):
    subject, model = loaded
    requests = [Request([1, 2, 3], [k]) for k in range(20)] + [Request([1, 2], [3, 9])]
    ran = []
    scores = score(model, requests, context=subject.context, batch_tokens=4096, on_progress=ran.append)
    assert ran == [3]
    assert cost(VOCAB, requests, context=subject.context, batch_tokens=4096) == 3
    for request, scored in zip(requests, scores, strict=True):
        np.testing.assert_allclose(scored.logprobs, oracle(model, request, 64)[0], atol=1e-4)


def test_progress_adds_up_to_the_cost_and_batches_stay_small(loaded, monkeypatch):
    subject, model = loaded
    requests = some_requests(40)
    for logit_bytes in (1 << 30, 40 * VOCAB * 4):
        monkeypatch.setattr(scoring, "LOGIT_BYTES", logit_bytes)
        ran = []
        score(model, requests, context=subject.context, batch_tokens=120, on_progress=ran.append)
        assert sum(ran) == cost(subject.vocab_size, requests, context=subject.context, batch_tokens=120)
        assert max(ran) <= 120
        assert len(ran) > 5


def test_pairs_are_cut_where_lm_eval_cuts_them(loaded):
    tokenizer = loaded[0].tokenizer
    whole = tokenizer("the lazy fox jumps")["input_ids"]
    (plain,) = encode_pairs(tokenizer, [("the lazy", " fox jumps")])
    (moved,) = encode_pairs(tokenizer, [("the lazy ", "fox jumps")])
    assert plain == moved
    assert [*plain.context, *plain.continuation] == whole
    assert plain.context == tokenizer("the lazy")["input_ids"]


def test_an_empty_context_is_the_token_that_begins_a_text(loaded):
    tokenizer = loaded[0].tokenizer
    (pairs,) = encode_pairs(tokenizer, [("", "fox")])
    assert pairs == Request([0], tokenizer("fox")["input_ids"])
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(UserError, match="a context is empty and the tokenizer has no token"):
        encode_pairs(bare, [("", "fox")])


def test_a_token_that_the_tokenizer_puts_in_front_is_known(loaded):
    tokenizer = copy.deepcopy(loaded[0].tokenizer)
    assert token_in_front(tokenizer) == ()
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    assert token_in_front(tokenizer) == (tokenizer.bos_token_id,)


def test_a_continuation_swallowed_by_the_last_word_is_encoded_on_its_own(loaded):
    tokenizer = loaded[0].tokenizer
    assert len(tokenizer("the")["input_ids"]) == len(tokenizer("t")["input_ids"]) == 1
    (pairs,) = encode_pairs(tokenizer, [("t", "he")])
    assert pairs == Request(tokenizer("t")["input_ids"], tokenizer("he")["input_ids"])
    with pytest.raises(UserError, match="the continuation '' has no token"):
        encode_pairs(tokenizer, [("the", "")])


def test_a_broken_model_is_not_scored(loaded):
    subject, model = loaded
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the model gives a log-probability of nan: its weights are damaged"):
        score(broken, some_requests(3), context=subject.context, batch_tokens=100)


@pytest.mark.parametrize("bos", [(), (99,)], ids=["plain", "bos"])
@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 16, 31])
def test_every_token_is_scored_once_within_its_window(length, stride, bos):
    ids, width = list(range(length)), 8
    spans = windows(ids, width, stride, bos)
    scored = [token for request in spans for token in request.continuation]
    for request in spans:
        whole = [*request.context, *request.continuation]
        assert len(whole) <= width
        assert tuple(whole[: len(bos)]) == bos
        seen = whole[len(bos) :]
        assert seen == list(range(seen[0], seen[-1] + 1))
    if bos:
        assert scored == ids
    elif stride < width:
        assert scored == ids[1:]
        assert all(len(request.context) >= width - stride for request in spans[1:-1])
    else:
        assert scored == [i for i in ids if i % width]


def test_sliding_perplexity_is_each_tokens_own_with_its_context(folders):
    subject = open_checkpoint(folders["block"])
    model = subject.load()
    ids = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    scores = score(model, windows(ids, 16, 4), context=64, batch_tokens=256)
    total = 0.0
    for t in range(1, 50):
        end = 16 if t < 16 else min(50, 16 + math.ceil((t - 15) / 4) * 4)
        begin = 0 if t < 16 else 4 * math.ceil((t - 15) / 4)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[begin:end]])).logits[0, t - 1 - begin]
        total += logits.double().log_softmax(0)[ids[t]].item()
    assert sum(scored.total for scored in scores) == pytest.approx(total, abs=1e-3)


def test_wikitext_is_joined_as_its_hub_version_is():
    assert wikitext([" ", " = A = ", "text"]) == "\n\n = A = \n\n\ntext\n"


rng = np.random.default_rng(0)


def ones(n):
    return np.ones(n)


def test_accuracy_has_the_binomial_error_with_its_correction():
    right = (rng.random(50) < 0.3).astype(float)
    value, error = TaskMeasure("acc", "", right, ones(50)).estimate()
    assert value == right.mean()
    assert error == pytest.approx(math.sqrt(value * (1 - value) / 49))


def test_perplexity_has_the_error_of_its_mean_times_itself():
    loss = rng.random(40) + 2
    value, error = TaskMeasure("ppl", "", loss * 7, 7 * ones(40), exp=True).estimate()
    assert value == pytest.approx(math.exp(loss.mean()))
    assert error == pytest.approx(value * loss.std(ddof=1) / math.sqrt(40))


def test_a_shorter_window_weighs_less():
    value, _ = TaskMeasure("ppl", "", np.array([20.0, 1.0]), np.array([10.0, 1.0])).estimate()
    assert value == pytest.approx(21 / 11)


def test_a_single_item_has_no_error_and_left_out_items_do_not_count():
    assert TaskMeasure("acc", "", np.array([1.0]), ones(1)).estimate() == (1.0, None)
    some = TaskMeasure("acc", "", np.array([1.0, math.nan, 0.0]), ones(3))
    assert some.count == 2
    assert some.estimate()[0] == 0.5


def test_a_difference_is_taken_item_by_item():
    hard = rng.normal(size=60) * 5
    first, second = 10 + hard, 10.2 + hard + 0.1 * rng.normal(size=60)
    gap = difference(TaskMeasure("m", "", first, ones(60)), TaskMeasure("m", "", second, ones(60)))
    assert gap.paired
    assert gap.value == pytest.approx((second - first).mean())
    assert gap.error == pytest.approx((second - first).std(ddof=1) / math.sqrt(60))
    assert gap.error < 0.1 * np.hypot(first.std(), second.std()) / math.sqrt(60)


def test_an_item_that_one_model_left_out_is_in_no_difference():
    first = TaskMeasure("acc", "", np.array([1.0, 0.0, 1.0]), ones(3))
    second = TaskMeasure("acc", "", np.array([0.0, math.nan, 1.0]), ones(3))
    gap = difference(first, second)
    assert (gap.value, gap.count) == (-0.5, 2)


def test_other_tokens_forbid_a_difference_but_of_bits_per_byte():
    def measure(tokens, n, universal=False):
        return TaskMeasure("m", "", rng.random(n), ones(n), exp=not universal, tokens=tokens, universal=universal)

    gap = difference(measure("a", 5), measure("b", 5))
    assert (gap.value, gap.reason) == (None, OTHER_TOKENS)
    one, two = measure("a", 50, True), measure("b", 40, True)
    gap = difference(one, two)
    assert not gap.paired
    assert gap.value == pytest.approx(two.estimate()[0] - one.estimate()[0])
    assert gap.error == pytest.approx(math.hypot(one.estimate()[1], two.estimate()[1]))


def test_texts_that_are_cut_at_other_places_are_not_compared():
    ends = [np.array([1.0, 2.0]), np.array([1.0, 1.0])]
    one, two = (
        TaskMeasure("b", "b", *ends, tokens=name, universal=True, cut=cut) for name, cut in (("a", False), ("c", True))
    )
    assert difference(one, two) == difference(two, one)
    assert difference(one, two).value is None and difference(one, two).reason == OTHER_PLACES


def test_a_figure_without_items_has_no_difference():
    one = TaskMeasure("bleu", "", np.empty(0), np.empty(0), fixed=(31.0, None))
    assert one.estimate() == (31.0, None)
    assert difference(one, one).reason == NO_ITEMS


def test_the_digest_sees_every_token_and_boundary():
    same = [Request([1, 2], [3])]
    assert tokens_digest(same) == tokens_digest([Request((1, 2), [3])])
    assert tokens_digest(same) != tokens_digest([Request([1], [2, 3])])
    assert tokens_digest(same) != tokens_digest([Request([1, 2], [4])])
