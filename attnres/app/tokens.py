"""A pane's text, each token coloured by what the reader chose, and what the colours say."""

from html import escape

import numpy as np

from attnres.app.markup import swatch, visible
from attnres.app.pane import Pane, Scales
from attnres.app.reading import dominant
from attnres.app.state import ATTENDED, LARGEST, LOSS
from attnres.inspect.colours import LESS, MORE, blend, ink_on, place_of_size
from attnres.text import number, short, tick

PLAIN = "#ffffff"
"""Of a token that nothing colours; the others are blended with it."""
NAMED = 3
"""Sources of a read that a token names when it is pointed at."""
FULL = 0.65
"""Of a colour in the largest number's background: text stays readable on it."""


def heading(p: Pane) -> str:
    """What colours the tokens, in words."""
    read = p.reading.reads[p.read]
    read = "the output's read" if read == "output" else f"the read of {read}"
    if p.source == LOSS:
        return "Tokens by the change of their loss"
    if p.source == ATTENDED:
        return f"Tokens by the attention of {p.of_token}, mean over heads and layers"
    if p.column is None:
        return f"Tokens by the largest source of {read}, by {p.by}"
    return f"Tokens by the {p.by} of {p.source} in {read}"


def text(p: Pane, colours: dict[str, str], scales: Scales) -> str:
    """The tokens, each to be chosen, on its colour; `colours` are of sources."""
    fills = _fills(p, colours, scales)
    rows, names = p.reading.rows(p.by)[p.read], p.reading.sources[p.read]
    parts = []
    for i, piece in enumerate(p.reading.pieces):
        order = np.argsort(-np.abs(rows[i]))[:NAMED]
        largest = ", ".join(f"{names[j]} {short(float(rows[i][j]))}" for j in order)
        verb = "is made of" if p.by == "contribution" else "weighs"
        tip = f"token {i} “{visible(p.reading.names[i])}” {verb} {largest}"
        if i:
            tip += f"; loss {number(p.reading.losses[i - 1], 2)}"
            if p.effect is not None:
                tip += f" → {number(p.effect.losses[i - 1], 2)}"
        pressed = ' aria-pressed="true"' if i == p.token else ' aria-pressed="false"'
        words = _inline(piece) if piece or p.reading.names[i] == piece else "·"
        parts.append(
            f'<span class="token" role="button" tabindex="{0 if i == p.token else -1}" data-token="{i}"{pressed} '
            f'style="background:{fills[i]};color:{ink_on(fills[i])}" aria-label="{escape(tip)}">{escape(words)}</span>'
        )
    return f'<div class="text">{"".join(parts)}</div>'


def legend(p: Pane, colours: dict[str, str], scales: Scales) -> str:
    """What the colours of the tokens mean."""
    names, place = p.reading.sources[p.read], p.column
    if p.source == LOSS:
        if p.effect is None:
            return '<p class="legend">Nothing is knocked out: no loss has changed. Click a cell.</p>'
        return _ramp(-scales.loss, scales.loss, "nats: orange is worse without it, blue better", flip=True)
    if p.source == ATTENDED:
        return _ramp(0.0, 1.0, "of the attention" if p.attention is not None else "this model shows no attention")
    if place is not None:
        column = p.reading.rows(p.by)[p.read][:, place]
        low = -scales.part if column.min(initial=0) < 0 else 0.0
        return _ramp(low, scales.part, f"{p.by}; mean {short(float(column.mean()))}")
    if _alike(p):
        return (
            '<p class="legend">All sources of this read weigh the same: none is the largest. Knock one out, and '
            "colour tokens by the change in loss.</p>"
        )
    counts = np.bincount(dominant(p.reading.rows(p.by)[p.read]), minlength=len(names))
    shown = [j for j in np.argsort(-counts) if counts[j]]
    words = [f"{swatch(colours[names[j]])} {escape(names[j])} ({counts[j]})" for j in shown]
    missing = "" if p.source == LARGEST else f"This read has no source {escape(p.source)}: by its largest instead. "
    return f'<p class="legend">{missing}{" ".join(f"<span>{word}</span>" for word in words)}</p>'


def _fills(p: Pane, colours: dict[str, str], scales: Scales) -> list[str]:
    """A background for each token."""
    if p.source == LOSS:
        return [PLAIN] + [_shade(-change, scales.loss) for change in p.loss_change]
    if p.source == ATTENDED:
        return [_shade(part, 1.0) for part in p.attended]
    rows, names, place = p.reading.rows(p.by)[p.read], p.reading.sources[p.read], p.column
    if place is not None:
        return [_shade(part, scales.part) for part in rows[:, place]]
    if _alike(p):
        return [PLAIN] * len(rows)
    return [colours[names[j]] for j in dominant(rows)]


def _inline(piece: str) -> str:
    """A token's text within the text: spaces stay spaces and lines end, so that the text reads as it is."""
    lines = [" ".join(visible(word) if word else "" for word in line.split(" ")) for line in piece.split("\n")]
    return "↵\n".join(lines) if piece else visible(piece)


def _shade(value: float, largest: float) -> str:
    """Blue of more, orange of less, over the root of the size."""
    return blend(PLAIN, MORE if value > 0 else LESS, FULL * abs(place_of_size(float(value), largest)))


def _alike(p: Pane) -> bool:
    """Whether no source weighs more than another, as in a plain sum."""
    sizes = np.abs(p.reading.weights[p.read])
    return p.by == "weight" and sizes.shape[1] > 1 and bool(np.allclose(sizes, sizes[:, :1]))


def _ramp(low: float, high: float, words: str, flip: bool = False) -> str:
    """A scale with both its ends."""
    stops = [_shade((-1 if flip else 1) * value, high) for value in np.linspace(low, high, 9)]  # a root is no line
    ramp = f'<i class="ramp" style="background:linear-gradient(90deg,{",".join(stops)})"></i>'
    return f'<p class="legend">{tick(low)} {ramp} {tick(high)} {escape(words)}</p>'
