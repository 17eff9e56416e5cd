"""Score continuations by log-probability, and compute means with standard errors and paired differences of two models.

A context and its continuation are encoded together and cut after as many tokens as the context alone has; white space
at the context's end belongs to the continuation. This is lm-eval's rule (0.4.13, `TemplateLM.loglikelihood`,
`HFLM.tok_encode`), special tokens and empty contexts included. If the tokenizer merges across the boundary and nothing
is left to score, lm-eval stops; here the continuation is encoded alone.

Inputs too long for the model lose tokens on the left. They are padded on the right: a causal model's numbers at real
positions do not see the padding, so no mask is needed. Logits become fp32 before the softmax.

Every figure is a ratio of sums over items, m = sum(a) / sum(b): accuracy with a = right or wrong and b = 1, perplexity
exp(m) with a = -log p and b = tokens of a window. The standard error of m is that of a ratio estimate
(`attnres.stats`), for b = 1 lm-eval's; that of exp(m) is exp(m) se. Windows of one text are not quite independent, so
the standard error of a perplexity is a little too small. A difference is taken item by item, in m (nats for a
perplexity), with a = a2 - a1.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from attnres.errors import UserError
from attnres.head import POSITIONS, log_probs
from attnres.models.encoding import text_config
from attnres.stats import or_none, perplexity, ratio

LOGIT_BYTES = 1 << 30
"""Largest size of one batch's logits, unless the batch is a single sequence: with a large vocabulary they are the
largest tensor."""


class Request(NamedTuple):
    """A request: ids of the context (at least one) and of the continuation to score (at least one)."""

    context: Sequence[int]
    continuation: Sequence[int]


class Scored(NamedTuple):
    """The scores of a continuation by token: log-probability in nats, (n,) fp32, and whether the token was the
    likeliest, (n,) bool."""

    logprobs: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        """Return the log-probability of the continuation, in nats."""
        return float(self.logprobs.sum(dtype=np.float64))


def encode_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> list[Request]:
    """Return the requests for (context, continuation) texts.

    A text gets the special tokens that the tokenizer puts around it, unless it begins with the first of them already.
    The token for the beginning of a text, else that for its end, stands for an empty context; a continuation that
    begins with that token gives it to its context.

    Raises:
        UserError: a continuation of no token, or an empty context and a tokenizer without such a token.
    """
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    begin = None if prefix is None else str(tokenizer.decode(prefix))
    parts = [(context, context.rstrip()) for context, _ in pairs]
    texts = {text for (context, kept), (_, after) in zip(parts, pairs) for text in (kept, context + after)}
    bare = {text for text in texts if begin is not None and text.startswith(begin)}
    ids = {**_encode(tokenizer, texts - bare, special=True), **_encode(tokenizer, bare, special=False)}
    requests = []
    for (context, kept), (_, after) in zip(parts, pairs):
        before = ids[kept] if context else []
        continuation = ids[context + after][len(before) :]
        if not before or not continuation:
            after = context[len(kept) :] + after
            continuation = _encode(tokenizer, {after}, special=False)[after]
        if not before:
            if prefix is None:
                raise UserError("a context is empty and the tokenizer has no token for the beginning or end of a text")
            before, continuation = (
                ([prefix], continuation) if continuation[:1] != [prefix] else (continuation[:1], continuation[1:])
            )
        if not continuation:
            raise UserError(f"the continuation {after!r} has no token: expected some text")
        requests.append(Request(before, continuation))
    return requests


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Collection[str], *, special: bool) -> dict[str, list[int]]:
    if not texts:
        return {}
    options = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
    return dict(zip(texts, tokenizer(list(texts), **options)["input_ids"]))


class _Row(NamedTuple):
    """One sequence to run, and the requests that its logits answer."""

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
        context: the longest sequence that the model takes; no continuation may be longer.
        on_progress: called with the number of tokens (padding included) of each finished batch; `cost` gives their sum.

    Raises:
        UserError: the model gives NaN or infinity.
    """
    device = next(model.parameters()).device
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    done: list[Scored | None] = [None] * len(requests)
    vocabulary = int(getattr(text_config(model.config), "vocab_size", 0) or 0)
    for batch in _batches(_rows(requests, context), batch_tokens, vocabulary):
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
                        f"the model gives a log-probability of {result.logprobs.min()}: its weights are damaged or "
                        "its dtype is too narrow (try --dtype fp32)"
                    )
                done[j] = result
        if on_progress is not None:
            on_progress(ids.numel())
    return [result for result in done if result is not None]


def cost(model_vocabulary: int, requests: Sequence[Request], *, context: int, batch_tokens: int) -> int:
    """Return the number of tokens, padding included, that `score` will run."""
    batches = _batches(_rows(requests, context), batch_tokens, model_vocabulary)
    return sum(len(batch) * len(batch[0].ids) for batch in batches)


def _rows(requests: Sequence[Request], context: int) -> list[_Row]:
    rows: dict[tuple[int, ...], _Row] = {}
    for i, (context_ids, continuation) in enumerate(requests):
        if len(continuation) > context:
            raise ValueError(f"request {i} scores {len(continuation)} tokens, the context is {context}")
        ids = (*context_ids, *continuation)[-(context + 1) :][:-1]
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


def _score_row(logits: Tensor, continuations: list[Sequence[int]]) -> list[Scored]:
    """Score continuations of different lengths that end together; logits (kept, V) predict the last `kept` tokens."""
    scores = torch.empty(len(continuations), len(logits), dtype=torch.float32)
    greedy = torch.zeros(len(continuations), len(logits), dtype=torch.bool)
    targets = torch.full((len(continuations), len(logits)), -1)
    for i, continuation in enumerate(continuations):
        targets[i, len(logits) - len(continuation) :] = torch.tensor(continuation)
    targets = targets.to(logits.device)
    for start in range(0, len(logits), POSITIONS):  # makes an fp32 copy of only a few positions at a time
        part = log_probs(logits[start : start + POSITIONS])
        part_targets = targets[:, start : start + POSITIONS]
        scores[:, start : start + POSITIONS] = part.gather(1, part_targets.clamp(min=0).T).T.cpu()
        greedy[:, start : start + POSITIONS] = (part.argmax(1) == part_targets).cpu()
    return [
        Scored(scores[i, -len(continuation) :].numpy(), greedy[i, -len(continuation) :].numpy())
        for i, continuation in enumerate(continuations)
    ]


def windows(ids: Sequence[int], width: int, stride: int, bos: Sequence[int] = ()) -> list[Request]:
    """Cut a text into windows for perplexity: requests that score each token of `ids` at most once, in order.

        stride = width  non-overlapping: each window is seen alone, its first token has no context and is not scored
        stride < width  sliding: each token but the text's first is scored in the first window that holds it, with
                        width - stride tokens or more before it after the first window

    The second is Transformers' "perplexity of fixed-length models"; neither is lm-eval's perplexity per word. A
    tokenizer that puts tokens in front of a text (`bos`) puts them in front of every window, where they take up places;
    then every token is scored.

    >>> [(list(r.context), list(r.continuation)) for r in windows(range(6), width=4, stride=4)]
    [([0], [1, 2, 3]), ([4], [5])]
    >>> [(list(r.context), list(r.continuation)) for r in windows(range(6), width=4, stride=2)]
    [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    room = width - len(bos)
    # With stride = width windows share no token, with or without a token in front.
    step = min(stride, room)
    requests, scored = [], 0
    for begin in range(0, len(ids), step):
        end = min(begin + room, len(ids))
        start = max(scored, begin + (0 if bos else 1))
        if start < end:
            requests.append(Request([*bos, *ids[begin:start]], list(ids[start:end])))
        scored = end
        if end == len(ids):
            break
    return requests


OTHER_TOKENS = "different tokens: bits per byte compare, this does not"
OTHER_PLACES = "different tokens, by which the limit cuts the text: leave out --limit to compare"
NO_ITEMS = "no values per item"
"""Reason why two models have no difference."""


@dataclass(frozen=True)
class TaskMeasure:
    """One figure of one model on one task.

    Attributes:
        key, label: names in files and in tables.
        above: a_i (n,); NaN for an item that was left out.
        below: b_i (n,).
        exp: whether the figure is exp(m).
        unit: of m and so of differences.
        chance: the figure of random guessing, if known.
        tokens: a digest of the tokens that the figure depends on; empty if it does not depend on the tokenizer.
        cut: whether the text was truncated, at one of this model's tokens.
        universal: whether the figure may be compared across tokenizers, though its items may not.
    """

    key: str
    label: str
    above: np.ndarray
    below: np.ndarray
    exp: bool = False
    unit: str = ""
    chance: float | None = None
    tokens: str = ""
    universal: bool = False
    cut: bool = False
    fixed: tuple[float, float | None] | None = None
    """(figure, standard error) from another program that gave no values per item."""

    @property
    def count(self) -> int:
        """Return the number of scored items."""
        return int(np.isfinite(self.above).sum())

    def estimate(self) -> tuple[float, float | None]:
        """Return (figure, standard error); no error for a single item."""
        if self.fixed is not None:
            return self.fixed
        mean, error, *_ = ratio(self.above, self.below)
        figure = perplexity(mean) if self.exp else mean
        return figure, or_none(figure * error if self.exp else error)


@dataclass(frozen=True)
class PairedDifference:
    """The second model minus the first, in the unit of m, or the reason why there is no difference."""

    value: float | None
    error: float | None = None
    count: int = 0
    paired: bool = True
    reason: str = ""


def difference(first: TaskMeasure, second: TaskMeasure) -> PairedDifference:
    """Return the paired difference; for bits per byte over different tokens, the plain difference; otherwise none if
    the tokens differ."""
    if first.fixed is not None or second.fixed is not None:
        return PairedDifference(None, reason=NO_ITEMS)
    if first.tokens == second.tokens:
        change = ratio(second.above - first.above, first.below)
        return PairedDifference(change.mean, or_none(change.error), change.items)
    if first.universal and (first.cut or second.cut):
        return PairedDifference(None, reason=OTHER_PLACES)
    if not first.universal:
        return PairedDifference(None, reason=OTHER_TOKENS)
    (before, first_error), (after, second_error) = first.estimate(), second.estimate()
    known = first_error is not None and second_error is not None
    error = math.hypot(first_error or 0.0, second_error or 0.0) if known else None
    return PairedDifference(after - before, error, min(first.count, second.count), paired=False)


def tokens_digest(requests: Sequence[Request]) -> str:
    """Return a digest that is equal for two models exactly if their requests have the same tokens."""
    digest = hashlib.sha256()
    for request in requests:
        for ids in request:
            digest.update(np.asarray(ids, dtype=np.int64).tobytes())
            digest.update(b"|")
    return digest.hexdigest()
