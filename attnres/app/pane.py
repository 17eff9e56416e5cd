"""The numbers of a pane: everything that the page shows of one model."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from attnres.app.measured import Asked, Reading
from attnres.app.opened import Opened
from attnres.app.state import View
from attnres.errors import UserError
from attnres.inspect.attribution import Attribution
from attnres.inspect.geometry import sharpness
from attnres.inspect.notebook import sheet
from attnres.inspect.steps import step_change
from attnres.residuals import Read, columns, depths, outputs
from attnres.stats import plain
from attnres.text import visible

ATTENDED = 3
"""Tokens that are named of those which one attends to."""
DIGITS = 5
"""Significant, of the numbers that are sent."""


def pane_of(model: Opened, view: View, number: int, asked: Asked, earliest: Opened | None) -> dict[str, Any]:
    """Return the numbers and words that the page shows of a model.

    Args:
        number: the model's. asked: the prediction that is explained, with the cuts that apply to the figures.
        earliest: the earliest kept step of its run, or None.

    Raises:
        UserError: a text that the model cannot read.
    """
    before, cuts, token = model.read(asked.text), view.cuts_of(number), asked.token
    after = model.read(asked.text, cuts) if cuts else None
    reading = after if after is not None and view.edited else before
    marked, layout = reading.underlined, reading.layout
    place = {source.name: i for i, source in enumerate(columns(read.sources for read in layout))}
    follows = before.ids[token + 1] if token + 1 < len(before.ids) else None
    candidates = model.likeliest(before, after, token)
    candidates += dict.fromkeys(
        one for one in (follows, asked.target, asked.against) if one is not None and one not in candidates
    )
    scores, divergence = model.scored(asked), None
    if after is not None:  # sum p ln(p / q) in nats, p without cuts, q with them
        p, q = (one.log_probs[token].double() for one in (before, after))
        divergence = float(nn.functional.kl_div(q, p, reduction="sum", log_target=True).clamp_min(0.0))
    return {
        "model": number,
        "title": model.label,
        "details": model.details,
        "notes": reading.notes,
        "tokens": reading.pieces,
        "names": [visible(name) for name in reading.names],
        "token": token,
        "loss": before.loss,
        "loss_cut": None if after is None else after.loss,
        "losses": before.losses,
        "losses_cut": None if after is None else after.losses,
        **sheet(layout),
        "contributions": [row[token] for row in reading.contributions],
        "weights": [row[token] for row in reading.weights],
        "marked": marked,
        "largest": [place[layout[marked].sources[i].name] for i in np.abs(reading.contributions[marked]).argmax(1)],
        "next": [
            {
                "id": one,
                "word": visible(model.piece(one)),
                "before": float(before.log_probs[token, one]),
                "after": None if after is None else float(after.log_probs[token, one]),
            }
            for one in candidates
        ],
        "target": asked.target,
        "against": asked.against,
        "follows": follows,
        "divergence": divergence,
        "lens": _lens(model, asked),
        "attends": _attends(model, layout, asked),
        "scores": None if scores is None else score_rows(scores),
        "training": _training(model, earliest) if view.tab == "training" else None,
        "outputs": _outputs(model, reading, asked) if len(view.models) > 1 else None,
        "over": _over_tokens(model, reading, view, asked),
    }


def score_rows(scores: Attribution) -> dict[str, Any]:
    """Return scores for the page: gradient estimates and measured changes, a row a read. An entry is None where the
    edge was not measured, or is its read's only source."""

    def with_choice(rows: Sequence[list[float]]) -> list[list[float | None]]:
        return [[*row] if len(row) > 1 else [None] * len(row) for row in rows]

    edges = sum(len(row) for row in scores.gradient if len(row) > 1)
    rows = {"gradient": with_choice(scores.gradient), "measured": with_choice(scores.knockout)}
    return plain(rows | {"edges": edges}, DIGITS)


def _lens(model: Opened, asked: Asked) -> list[dict[str, Any]] | None:
    """Return the logit lens, a row a read: likeliest token, its p, the target's p, KL; None where no head is found."""
    try:
        lens = model.lens(asked)
    except UserError:
        return None
    rows = zip(lens.top, lens.probability, lens.target, lens.divergence, strict=True)
    return [
        {"word": visible(model.piece(ids[0][0])), "p": p[0][0], "target": float(np.exp(goal[0])), "kl": kl[0]}
        for ids, p, goal, kl in rows
    ]


def _attends(model: Opened, layout: Sequence[Read], asked: Asked) -> list[list[Any] | None] | None:
    """Return for each attention read the tokens with the largest attention weights, [number, weight]; None where the
    model returns no attention weights."""
    try:
        attention = model.attend(asked.text, asked.cuts)
    except UserError:
        return None
    rows = dict(zip(attention.layers, attention.mean[:, asked.token, : asked.token + 1], strict=True))

    def most(read: Read) -> list[Any] | None:
        if read.kind != "attention" or read.number not in rows:
            return None
        top = rows[read.number].topk(min(ATTENDED, asked.token + 1))
        return [list(pair) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]

    return [most(read) for read in layout]


def _over_tokens(model: Opened, reading: Reading, view: View, asked: Asked) -> dict[str, Any] | None:
    """Return the contributions (or weights) of the opened read's sources at every token, and for an attention read the
    weights of each head at the chosen token; None where the view opens no read."""
    if view.layer is None or view.layer >= len(reading.layout):
        return None
    read, heads = reading.layout[view.layer], None
    values = reading.weights if view.by == "weight" else reading.contributions
    if read.kind == "attention":
        with contextlib.suppress(UserError):
            shown = model.attend(asked.text, asked.cuts, asked.token)
            place = shown.layers.index(read.number) if read.number in shown.layers else None
            heads = None if place is None else shown.heads[place].numpy()
    return {"read": view.layer, "values": values[view.layer].T, "heads": heads}


def _outputs(model: Opened, reading: Reading, asked: Asked) -> dict[str, Any] | None:
    """Return the mean contribution of every sublayer's output to every read, and the first-order effect of removing
    it, for models of different mechanisms side by side; None where reads are no sums of outputs."""
    if reading.outputs is None:
        return None
    kinds = tuple(dict.fromkeys(read.kind for read in reading.layout[:-1]))
    written = outputs(max(depths(reading.layout)) + 1, kinds)
    effects = model.circuit(asked, 0).effects
    return {
        "reads": [read.label for read in reading.layout],
        "columns": [source.label for source in written],
        "values": reading.outputs,
        "effects": [row + [0.0] * (len(written) - len(row)) for row in effects],
    }


def _training(model: Opened, earliest: Opened | None) -> dict[str, Any]:
    """Return the sharpness of a model's reads, the cosines between their queries, and how far the queries turned since
    the earliest kept step."""
    similar, change = model.similarity, None
    if earliest is not None:
        change = step_change(earliest.residual, model.residual, (earliest.step or 0, model.step or 0))
    return {
        "reads": [read.label for read in model.layout],
        "sharpness": sharpness(model.residual),
        "first": None if change is None else change.first,
        "before": None if change is None else change.before,
        "turned": None if change is None else change.turned,
        "similar": similar and {"reads": [read.label for read in similar[0]], "cosine": similar[1]},
    }
