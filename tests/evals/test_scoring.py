"""Continuations are scored exactly, however they are batched and padded."""

import copy

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import GPT2Config, GPT2LMHeadModel

from attnres import UserError
from attnres.evals import scoring
from attnres.evals.scoring import Request, cost, encode_pairs, score
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
    with pytest.raises(UserError, match="the model gives a log-probability of nan: its weights are broken"):
        score(broken, some_requests(3), context=subject.context, batch_tokens=100)
