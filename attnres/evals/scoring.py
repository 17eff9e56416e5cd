"""Log-probabilities of continuations: the one computation behind perplexity and every task.

A context and its continuation are encoded together and cut after as many tokens as the context alone has, white space
at the context's end moved to the continuation; this is lm-eval's rule (`TemplateLM._encode_pair`, 0.4.13). Where the
tokenizer merges across the boundary so that nothing would be left to score, the continuation is encoded on its own.

Inputs too long for the model lose tokens on the left. They are padded on the right: a causal model's numbers at real
positions do not see the padding, so no mask is needed. Logits become fp32 before the softmax.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from attnres.errors import UserError
from attnres.forward import POSITIONS, log_probs

LOGIT_BYTES = 1 << 30
"""What the logits of one batch may take, unless it is a single sequence: a large vocabulary makes them the largest
tensor there is."""


class Request(NamedTuple):
    """Token ids of what is given (at least one) and of what is scored (at least one)."""

    context: Sequence[int]
    continuation: Sequence[int]


class Scored(NamedTuple):
    """Of each token of a continuation: log-probability in nats (n,) fp32; whether it was the likeliest, (n,) bool."""

    logprobs: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        """Log-probability of the continuation, in nats."""
        return float(self.logprobs.sum(dtype=np.float64))


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]], prefix: int | None
) -> list[Request]:
    """Requests for (context, continuation) texts; `prefix` is the token that stands for an empty context.

    Raises:
        UserError: a continuation of no token, or an empty context and no `prefix`.
    """
    parts = []
    for context, continuation in pairs:
        kept = context.rstrip()
        parts.append((kept, context[len(kept) :] + continuation))
    if not parts:
        return []
    whole = _encode(tokenizer, [context + continuation for context, continuation in parts])
    given = _encode(tokenizer, [context for context, _ in parts])
    requests = []
    for (context, continuation), ids, context_ids in zip(parts, whole, given, strict=True):
        rest = ids[len(context_ids) :]
        if not context or not rest:
            rest = _encode(tokenizer, [continuation], special=False)[0]
        if not context:
            if prefix is None:
                raise UserError("a context is empty and the tokenizer has no token for the beginning or end of a text")
            context_ids = [prefix]
        if not rest:
            raise UserError(f"the continuation {continuation!r} has no token: expected some text")
        requests.append(Request(context_ids, rest))
    return requests


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool = True) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


class _Row(NamedTuple):
    """One sequence to run, and the requests that it answers: those whose input it is."""

    ids: tuple[int, ...]
    kept: int
    requests: list[int]


def score(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    context: int,
    batch_tokens: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score every request, in their order.

    Sequences are run from the longest to the shortest, in batches of at most `batch_tokens` tokens with padding; equal
    ones (one-token answers to one question) once.

    Args:
        context: the longest sequence the model takes; no continuation may be longer.
        on_progress: called with the number of tokens (padding included) of each finished batch; `cost` gives their sum.

    Raises:
        UserError: the model gives NaN or infinity.
    """
    device = next(model.parameters()).device
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    done: list[Scored | None] = [None] * len(requests)
    for batch in _batches(_rows(requests, context), batch_tokens, _vocabulary(model)):
        width = len(batch[0].ids)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
        # Only the positions from the first scored one on need logits.
        first = min(len(row.ids) - row.kept for row in batch) if keeps else 0
        options = {"logits_to_keep": width - first} if keeps else {}
        with torch.inference_mode():
            logits = model(input_ids=ids.to(device), use_cache=False, **options).logits
        for i, row in enumerate(batch):
            end = len(row.ids) - first
            scored = _score_row(logits[i, end - row.kept : end], [requests[j].continuation for j in row.requests])
            for j, result in zip(row.requests, scored, strict=True):
                if not np.isfinite(result.logprobs).all():
                    raise UserError(
                        f"the model gives a log-probability of {result.logprobs.min()}: its weights are broken or its "
                        "dtype too narrow (try --dtype fp32)"
                    )
                done[j] = result
        if on_progress is not None:
            on_progress(ids.numel())
    return [result for result in done if result is not None]


def cost(model_vocabulary: int, requests: Sequence[Request], *, context: int, batch_tokens: int) -> int:
    """Tokens, padding included, that `score` will run."""
    batches = _batches(_rows(requests, context), batch_tokens, model_vocabulary)
    return sum(len(batch) * len(batch[0].ids) for batch in batches)


def _rows(requests: Sequence[Request], context: int) -> list[_Row]:
    rows: dict[tuple[int, ...], _Row] = {}
    for i, (given, continuation) in enumerate(requests):
        if len(continuation) > context:
            raise ValueError(f"request {i} scores {len(continuation)} tokens, the context is {context}")
        ids = (*given, *continuation)[-(context + 1) :][:-1]
        known = rows.get(ids)
        rows[ids] = _Row(
            ids, max(known.kept if known else 0, len(continuation)), [*(known.requests if known else []), i]
        )
    return sorted(rows.values(), key=lambda row: -len(row.ids))


def _batches(rows: Sequence[_Row], batch_tokens: int, vocabulary: int) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    first = 0
    for row in rows:
        width = len(batch[0].ids) if batch else len(row.ids)
        start = min(first, len(row.ids) - row.kept) if batch else len(row.ids) - row.kept
        logits = (len(batch) + 1) * (width - start) * vocabulary * 4
        if batch and ((len(batch) + 1) * width > batch_tokens or logits > LOGIT_BYTES):
            yield batch
            batch, start = [], len(row.ids) - row.kept
        batch.append(row)
        first = start
    if batch:
        yield batch


def _vocabulary(model: nn.Module) -> int:
    config = getattr(model.config, "text_config", None) or model.config
    return int(getattr(config, "vocab_size", 0) or 0)


def _score_row(logits: Tensor, continuations: list[Sequence[int]]) -> list[Scored]:
    """logits (kept, V): those that predict the last `kept` tokens of the continuations, which end together."""
    scores = torch.empty(len(continuations), len(logits), dtype=torch.float32)
    greedy = torch.zeros(len(continuations), len(logits), dtype=torch.bool)
    targets = torch.full((len(continuations), len(logits)), -1)
    for i, continuation in enumerate(continuations):
        targets[i, len(logits) - len(continuation) :] = torch.tensor(continuation)
    targets = targets.to(logits.device)
    for start in range(0, len(logits), POSITIONS):  # an fp32 copy of a few positions at a time
        part = log_probs(logits[start : start + POSITIONS])
        wanted = targets[:, start : start + POSITIONS]
        scores[:, start : start + POSITIONS] = part.gather(1, wanted.clamp(min=0).T).T.cpu()
        greedy[:, start : start + POSITIONS] = (part.argmax(1) == wanted).cpu()
    return [
        Scored(scores[i, -len(continuation) :].numpy(), greedy[i, -len(continuation) :].numpy())
        for i, continuation in enumerate(continuations)
    ]
