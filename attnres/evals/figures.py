"""Make the requests of a task for one model, and the measures from their scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnres.errors import UserError
from attnres.evals.scoring import Request, Scored, TaskMeasure, encode_pairs, tokens_digest, windows
from attnres.evals.tasks import Task
from attnres.models.encoding import check_ids, encode_document, token_in_front
from attnres.models.open import Checkpoint


@dataclass(frozen=True)
class TaskQuestions:
    """One task as token ids for one model.

    Attributes:
        requests: all requests to score.
        groups: the requests of each item (for a text: of each way of cutting windows); empty for an item that was left
            out.
        notes: remarks for the reader of the figures.
    """

    task: Task
    requests: list[Request]
    groups: list[range]
    notes: list[str]
    width: int = 0
    stride: int = 0
    bytes: float = 0.0
    cut: bool = False


def ask(task: Task, checkpoint: Checkpoint, *, width: int, stride: int, limit: int | None) -> TaskQuestions:
    """Encode a task for one model; a text as at most `limit` non-overlapping windows.

    Raises:
        UserError: the tokenizer does not fit the model, or a text is too short to score.
    """
    questions = (
        _ask_text(task, checkpoint, width, stride, limit) if task.kind == "text" else _ask_items(task, checkpoint)
    )
    largest = max(max(max(part, default=0) for part in request) for request in questions.requests)
    check_ids([largest], checkpoint.vocab_size, checkpoint.name)
    return questions


def _ask_text(task: Task, checkpoint: Checkpoint, width: int, stride: int, limit: int | None) -> TaskQuestions:
    tokenizer = checkpoint.tokenizer
    ids, spans = encode_document(tokenizer, task.text)
    # bytes of the text after a special token that it brings in front
    size = len(task.text[spans[0][0] if spans else 0 :].encode())
    before = token_in_front(tokenizer)
    most = len(ids) if limit is None else limit * (width - len(before))
    cut = len(ids) > most
    if cut:
        ids = ids[:most]
        size = len(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).encode())
    apart = windows(ids, width, width, before)
    sliding = windows(ids, width, stride, before)
    if not apart:
        raise UserError(f"{task.source} is too short: expected two tokens or more")
    groups = [range(len(apart)), range(len(apart), len(apart) + len(sliding))]
    return TaskQuestions(task, apart + sliding, groups, [], width, stride, size / len(ids), cut)


def _ask_items(task: Task, checkpoint: Checkpoint) -> TaskQuestions:
    pairs = [pair for item in task.items for pair in item.pairs]
    encoded = iter(encode_pairs(checkpoint.tokenizer, pairs))
    requests: list[Request] = []
    groups, cut, left_out = [], 0, 0
    for item in task.items:
        encoded_pairs = [next(encoded) for _ in item.pairs]
        if any(len(request.continuation) > checkpoint.context for request in encoded_pairs):
            left_out += 1
            groups.append(range(0))
            continue
        cut += any(
            len(request.context) + len(request.continuation) > checkpoint.context + 1 for request in encoded_pairs
        )
        groups.append(range(len(requests), len(requests) + len(encoded_pairs)))
        requests += encoded_pairs
    if not requests:
        raise UserError(f"no item of {task.source} fits into the {checkpoint.context} tokens of {checkpoint.name}")
    notes = []
    if cut:
        notes.append(f"{cut:,} of {len(task.items):,} items cut on the left to {checkpoint.context:,} tokens")
    if left_out:
        notes.append(
            f"{left_out:,} of {len(task.items):,} items left out: an answer alone is longer than "
            f"{checkpoint.context:,} tokens"
        )
    return TaskQuestions(task, requests, groups, notes)


def figures(questions: TaskQuestions, scored: Sequence[Scored]) -> list[TaskMeasure]:
    """Return the measures of a task, computed from the scores of its requests."""
    makers = {"text": _text_figures, "word": _word_figures, "choice": _choice_figures}
    return makers[questions.task.kind](questions, scored)


def _text_figures(questions: TaskQuestions, scored: Sequence[Scored]) -> list[TaskMeasure]:
    names = (
        ("perplexity_non_overlapping", f"perplexity, non-overlapping windows of {questions.width:,}"),
        ("perplexity_sliding", f"perplexity, sliding windows of {questions.width:,} by {questions.stride:,}"),
    )
    measures = []
    for (key, label), group in zip(names, questions.groups, strict=True):
        digest = tokens_digest([questions.requests[i] for i in group])
        loss = np.array([-scored[i].total for i in group])
        count = np.array([float(len(scored[i].logprobs)) for i in group])
        measures.append(TaskMeasure(key, label, loss, count, exp=True, unit="nats/token", tokens=digest))
    last = measures[-1]
    # Each scored token counts the average bytes of a token: a window's first token has no context and no score.
    share = last.below * questions.bytes
    bits = last.above / math.log(2)
    more: dict[str, Any] = {"tokens": last.tokens, "universal": True, "cut": questions.cut}
    measures.append(TaskMeasure("bits_per_byte", "bits per byte, sliding windows", bits, share, **more))
    return measures


def _word_figures(questions: TaskQuestions, scored: Sequence[Scored]) -> list[TaskMeasure]:
    ones = np.ones(len(questions.groups))
    answers = [scored[group.start] if len(group) else None for group in questions.groups]

    def each(value) -> np.ndarray:
        return np.array([math.nan if answer is None else float(value(answer)) for answer in answers])

    digest = tokens_digest(questions.requests)
    return [
        TaskMeasure("acc", "accuracy, whole word", each(lambda s: s.greedy.all()), ones),
        TaskMeasure("perplexity", "perplexity of the word", each(lambda s: -s.total), ones, exp=True, unit="nats/word"),
        TaskMeasure("acc_first_token", "accuracy, first token only", each(lambda s: s.greedy[0]), ones, tokens=digest),
    ]


def _choice_figures(questions: TaskQuestions, scored: Sequence[Scored]) -> list[TaskMeasure]:
    task, ones = questions.task, np.ones(len(questions.groups))

    def right(divisor) -> np.ndarray:
        values = []
        for item, group in zip(task.items, questions.groups, strict=True):
            if not len(group):
                values.append(math.nan)
                continue
            totals = [scored[i].total / divisor(item, k, scored[i]) for k, i in enumerate(group)]
            values.append(float(int(np.argmax(totals)) == item.gold))
        return np.array(values)

    chance = sum(1 / len(item.pairs) for item in task.items) / len(task.items)
    by_length = right(lambda item, k, s: item.characters[k])
    measures = [
        TaskMeasure("acc", "accuracy", right(lambda item, k, s: 1), ones, chance=chance),
        TaskMeasure("acc_norm", "accuracy, by characters", by_length, ones, chance=chance),
    ]
    if task.per_token:
        by_tokens = right(lambda item, k, s: len(s.logprobs))
        measures.append(TaskMeasure("acc_per_token", "accuracy, by tokens", by_tokens, ones, chance=chance))
    return measures
