"""What the page shows of a model and one text: its numbers, the scales that panes share, and its tokens as HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from attnres.app.figures import swatch, visible
from attnres.app.reading import Candidate, Effect, Reading, dominant
from attnres.app.state import ATTENDED, LARGEST, LOSS, Cut
from attnres.inspect.attention import TokenAttention
from attnres.inspect.attribution import Attribution
from attnres.inspect.colours import LESS, MORE, blend, ink_on, place_of_size
from attnres.inspect.inspection import By
from attnres.inspect.notebook import FLOOR, end_of_scale
from attnres.residuals import Read
from attnres.stats import or_none, plain
from attnres.text import number, short, tick


@dataclass(frozen=True)
class Pane:
    """One model's half of the page.

    Attributes:
        number: the model's; place: the pane's, from 0. title, details: the model's name, and what it is.
        by, read, source: what colours the tokens (see `View`).
        cuts: what is knocked out; `effect` what that does.
        candidates: next tokens of the chosen `token`.
        similarity: reads and the cosines of their pseudo-queries.
        attention: what the tokens attend to; None where the model does not show it.
        queries: the same as a part of the page, HTML; empty where there are none.
        scores: of the edges of the prediction after the token, where they were measured; `target` the predicted token.
        graph: the same as a picture, SVG; empty where no edge changes it much.
    """

    number: int
    place: int
    title: str
    details: str
    reading: Reading
    by: By
    read: int
    source: str
    token: int
    cuts: tuple[Cut, ...]
    effect: Effect | None
    candidates: list[Candidate]
    similarity: tuple[list[Read], np.ndarray] | None
    queries: str = ""
    attention: TokenAttention | None = None
    scores: Attribution | None = None
    target: str = ""
    graph: str = ""

    @property
    def of_token(self) -> str:
        return f"“{visible(self.reading.names[self.token])}” (token {self.token})"

    @property
    def parts(self) -> list[np.ndarray]:
        """What each source is of the chosen token's reads."""
        return [row[self.token] for row in self.reading.rows(self.by)]

    def cut_at(self, token: int | None) -> frozenset[tuple[int, int]]:
        """Return (read, source) of what is knocked out at all tokens, and at one where it is given."""
        return frozenset((cut.read, cut.source) for cut in self.cuts if cut.token in (None, token))

    @property
    def cut_once(self) -> frozenset[tuple[int, int]]:
        """(read, source) of what is knocked out at single tokens."""
        return frozenset((cut.read, cut.source) for cut in self.cuts if cut.token is not None)

    @property
    def column(self) -> int | None:
        """The number of the source that colours the tokens, where that is one of the read's."""
        names = self.reading.sources[self.read]
        return names.index(self.source) if self.source in names else None

    @property
    def loss_change(self) -> np.ndarray:
        """(T - 1,) nats by which the knock-outs change each token's loss."""
        losses = self.reading.losses
        return np.zeros_like(losses) if self.effect is None else self.effect.losses - losses

    @property
    def divergence(self) -> float:
        """sum p ln(p/q) in nats at the chosen token, p the distribution before, q the one after."""
        if self.effect is None:
            return 0.0
        before, after = self.reading.log_probs[self.token].double(), self.effect.log_probs[self.token].double()
        return float((before.exp() * (before - after)).sum().clamp_min(0.0))

    @property
    def attended(self) -> np.ndarray:
        """(T,) attention of the chosen token, mean over heads and layers; zeros where the model shows none."""
        if self.attention is None:
            return np.zeros(len(self.reading.pieces))
        return self.attention.mean[:, self.token].mean(0).numpy()


@dataclass(frozen=True)
class Scales:
    """Where the scales of all panes end, so that a colour or a length is one number on the whole page.

    Attributes:
        loss: nats of change of a token's loss. part: of the source that colours the tokens. mean: of a cell's part of
            its read, at least 1. probability: of a next token. span: both ends of the bars. score: nats of change of
            ln p.
    """

    loss: float
    part: float
    mean: float
    probability: float
    span: tuple[float, float]
    score: float

    @classmethod
    def of(cls, panes: Sequence[Pane]) -> "Scales":
        """Return the least that holds every pane; what is smaller than `FLOOR` stays pale."""

        def end(values: Iterable[Sequence[float] | np.ndarray], least: float = FLOOR) -> float:
            return max([least, *(end_of_scale(np.asarray(one, dtype=float), least) for one in values)])

        shown = [p.reading.rows(p.by)[p.read][:, p.column] for p in panes if p.column is not None]
        chances = np.array([chance or 0.0 for p in panes for c in p.candidates for chance in (c.before, c.after)])
        negative = [float(np.nansum(np.minimum(row, 0))) for p in panes for row in p.parts]
        positive = [float(np.nansum(np.maximum(row, 0))) for p in panes for row in p.parts]
        return cls(
            loss=end(p.loss_change for p in panes),
            part=end(shown),
            mean=end((row for p in panes for row in p.reading.means(p.by)), 1.0),
            probability=end([chances], 0.01),
            span=(min([0.0, *negative]), max([1.0, *positive])),
            score=end(row for p in panes if p.scores is not None for row in p.scores.knockout),
        )


def export(panes: Sequence[Pane]) -> dict[str, object]:
    """Return what the page shows, as numbers for a JSON file."""
    return {
        "format": 2,
        "models": [
            {
                "name": p.title,
                "details": p.details,
                "tokens": p.reading.pieces,
                "ids": p.reading.ids,
                "reads": p.reading.reads,
                "sources": p.reading.sources,
                "weights": plain(p.reading.weights),
                "contributions": plain(p.reading.contributions),
                "losses": plain(p.reading.losses),
                "knocked_out": [
                    {"read": p.reading.reads[c.read], "source": p.reading.sources[c.read][c.source], "token": c.token}
                    for c in p.cuts
                ],
                "losses_after": plain(p.effect.losses) if p.effect is not None else None,
                "token": p.token,
                "next": [
                    {"token": c.piece, "before": or_none(c.before), "after": or_none(c.after)} for c in p.candidates
                ],
                "divergence": or_none(p.divergence) if p.effect is not None else None,
                "query_cosine": plain(p.similarity[1]) if p.similarity is not None else None,
                "scores": plain(p.scores.to_dict()) if p.scores is not None else None,
            }
            for p in panes
        ],
    }


PLAIN = "#ffffff"
"""Of a token that nothing colours; the others are blended with it."""
NAMED = 3
"""Sources of a read that a token names when it is pointed at."""
FULL = 0.65
"""Of a colour in the largest number's background: text stays readable on it."""


def token_heading(p: Pane) -> str:
    """Say what colours the tokens."""
    read = p.reading.reads[p.read]
    read = "the output's read" if read == "output" else f"the read of {read}"
    if p.source == LOSS:
        return "Tokens by the change of their loss"
    if p.source == ATTENDED:
        return f"Tokens by the attention of {p.of_token}, mean over heads and layers"
    if p.column is None:
        return f"Tokens by the largest source of {read}, by {p.by}"
    return f"Tokens by the {p.by} of {p.source} in {read}"


def token_text(p: Pane, colours: dict[str, str], scales: Scales) -> str:
    """Return the tokens, each to be chosen, on its colour; `colours` are of sources."""
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


def token_legend(p: Pane, colours: dict[str, str], scales: Scales) -> str:
    """Return what the colours of the tokens mean."""
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
    """Return a background for each token."""
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
    """Return a token's text within the text: spaces stay spaces and lines end, so that the text reads as it is."""
    lines = [" ".join(visible(word) if word else "" for word in line.split(" ")) for line in piece.split("\n")]
    return "↵\n".join(lines) if piece else visible(piece)


def _shade(value: float, largest: float) -> str:
    """Blue of more, orange of less, over the root of the size."""
    return blend(PLAIN, MORE if value > 0 else LESS, FULL * abs(place_of_size(float(value), largest)))


def _alike(p: Pane) -> bool:
    """Return whether no source weighs more than another, as in a plain sum."""
    sizes = np.abs(p.reading.weights[p.read])
    return p.by == "weight" and sizes.shape[1] > 1 and bool(np.allclose(sizes, sizes[:, :1]))


def _ramp(low: float, high: float, words: str, flip: bool = False) -> str:
    """Return a scale with both its ends."""
    stops = [_shade((-1 if flip else 1) * value, high) for value in np.linspace(low, high, 9)]  # a root is no line
    ramp = f'<i class="ramp" style="background:linear-gradient(90deg,{",".join(stops)})"></i>'
    return f'<p class="legend">{tick(low)} {ramp} {tick(high)} {escape(words)}</p>'
