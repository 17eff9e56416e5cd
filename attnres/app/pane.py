"""What the page shows of a model and one text, as numbers; the scales that panes share; no model runs here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from attnres.app.markup import visible
from attnres.app.reading import Candidate, Effect, Reading
from attnres.app.state import Cut
from attnres.inspect.attention import TokenAttention
from attnres.inspect.attribution import Attribution
from attnres.inspect.inspection import By
from attnres.inspect.notebook import FLOOR, end_of_scale
from attnres.residuals import Read
from attnres.stats import or_none, plain


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
        """(read, source) of what is knocked out at all tokens, and at one where it is given."""
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
        """The least that holds every pane; what is smaller than `FLOOR` stays pale."""

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
    """What the page shows, as numbers for a JSON file."""
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
