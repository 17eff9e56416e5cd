"""Measure a run's model by depth: magnitudes in a training step, and inspection.json from the held-out windows."""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from attnres.data.sources import title_of
from attnres.head import evaluating
from attnres.stats import plain
from attnres.training.config import DataConfig
from attnres.training.objective import Cast

if TYPE_CHECKING:
    from attnres.data import Prepared, Tokens


BATCH_TOKENS = 8192
"""Most tokens of a forward pass: the weights of all its tokens are held at once."""
LOOK_BACK = 4096
"""Tokens before a window in which the start of its document is looked for; if it is not there, token kinds are
unknown."""
EXAMPLE = 128
"""Tokens that are shown individually."""


def write_inspection(
    folder: Path, model: nn.Module, prepared: "Prepared", data: DataConfig, *, name: str | None, cast: Cast, rows: int
) -> None:
    """Write inspection.json into the folder of a run called `name`.

    Args:
        prepared: the data; the windows are those of validation, run in the precision of `cast`.
        rows: windows in a forward pass, a number known to fit in memory.
    """
    from transformers import PreTrainedTokenizerFast

    from attnres.data import load_tokenizer
    from attnres.data.batches import held_out_starts
    from attnres.inspect.inspection import dynamics
    from attnres.inspect.inspector import from_survey, show_example
    from attnres.inspect.kinds import KINDS, guess_language
    from attnres.inspect.survey import Encoded, survey
    from attnres.training.records import read_metrics

    length = data.seq_len
    tokens, tokenizer = prepared.tokens("val"), load_tokenizer(prepared.path)
    starts = held_out_starts(tokens, length, data.val_windows)
    begins = tokens.document_starts().astype(np.int64)
    place = np.searchsorted(begins, starts, side="right") - 1
    text = tokenizer.decode(np.concatenate([tokens[start : start + length] for start in starts[:8]]).tolist())
    kind = guess_language(text)

    def documents() -> Iterator[Encoded]:
        """Yield the windows that begin in the same document, together."""
        for document in np.unique(place):
            windows = [start for start, number in zip(starts, place) if number == document]
            ids = np.concatenate([tokens[start : start + length] for start in windows])
            yield Encoded(ids, [], _labels(tokens, int(begins[document]), windows, length, tokenizer, kind))

    batch = max(1, min(rows, BATCH_TOKENS // length))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with evaluating(model), cast():
        measured = survey(model, documents(), context=length, batch_size=batch, labels=len(KINDS[kind]))
        example = show_example(model, fast, _example(tokens, starts, tokenizer), context=length, kind=kind)
    inspection = from_survey(
        model,
        measured,
        name=name,
        source=f"{title_of(data.source)}, held out",
        context=length,
        kind=kind,
        kinds=KINDS[kind],
    )
    metrics = read_metrics(folder / "metrics.jsonl")
    dataclasses.replace(inspection, example=example, dynamics=dynamics(metrics)).save(folder / "inspection.json")


def _labels(tokens: "Tokens", first: int, starts: list[int], length: int, tokenizer: Any, kind: str) -> np.ndarray:
    """Return the kinds of the tokens of the windows at `starts`, which begin in the document at `first`; -1 if unknown.

    A document is decoded from its beginning, which determines what is inside a string or begins a sentence, and encoded
    again, which gives the position of each token in the text.
    """
    from attnres.inspect.kinds import kinds_of
    from attnres.models.encoding import with_space

    near = [start for start in starts if start - first <= LOOK_BACK]
    known = np.full((near[-1] if near else first) + length - first, -1)
    ids = tokens[slice(first, first + len(known))] if near else np.empty(0, dtype=np.int64)
    ends = np.flatnonzero(ids == tokens.eos_id).tolist()
    for begin, end in zip([0, *(place + 1 for place in ends)], [*ends, len(ids)]):
        part = ids[begin:end].tolist()
        text = tokenizer.decode(part, skip_special_tokens=False)
        retokenised = tokenizer.encode(text, add_special_tokens=False)
        pairs = enumerate(zip(part, retokenised.ids))
        # They differ after the last token if it ends in the middle of a word.
        same = next((place for place, (one, other) in pairs if one != other), min(len(part), len(retokenised.ids)))
        known[begin : begin + same] = kinds_of(text, with_space(text, retokenised.offsets), kind)[:same]
    rows = [known[start - first : start - first + length] if start in near else np.full(length, -1) for start in starts]
    return np.concatenate(rows)


def _example(tokens: "Tokens", starts: list[int], tokenizer: Any) -> str:
    """Return held-out text: the beginning of the first document that is long enough, else of the first window."""
    begins = tokens.document_starts().astype(np.int64)
    lengths = np.diff(np.append(begins, len(tokens))) - 1
    long = np.flatnonzero(lengths >= EXAMPLE)
    start = int(begins[long[0]]) if len(long) else starts[0]
    ids = tokens[start : start + EXAMPLE]
    ends = np.flatnonzero(ids == tokens.eos_id)
    return tokenizer.decode(ids[: ends[0] if len(ends) else None].tolist())


# ------------------------------------------------------------------ one training step


def recorded(model: Any) -> AbstractContextManager[Any]:
    """Record the forward and backward passes inside the block."""
    from attnres.inspect import record

    return record(model, contributions=False)  # without contributions, so that a step's memory does not grow


def magnitudes(trace: Any, model: Any, unit: int) -> dict[str, Any]:
    """Return the RMS of outputs, inputs and gradients of a recorded pass and, for depth reads, how they choose.

    `unit` is the factor that turns the pass's loss into a mean, so that gradients are those of a mean loss.
    """
    from attnres.inspect import find_residual
    from attnres.inspect.geometry import learned_mixing, sharpness

    values: dict[str, Any] = {
        "output_rms": trace.output_rms,
        "input_rms": trace.input_rms,
        "grad_rms": [value * unit for value in trace.grad_rms],
    }
    residual = find_residual(model)
    if residual.traits.by_token:
        values["entropy"] = trace.entropy
    if residual.traits.has_query:
        values["sharpness"] = sharpness(residual)
    values |= learned_mixing(residual) or {}
    return plain(values, digits=17)  # the entropy of a read without weights is NaN
