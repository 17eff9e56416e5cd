"""What the page shows of models, as HTML: analyses in, strings out, all text escaped; no model runs here."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from attnres.app import figures
from attnres.app.explorer import Candidate, Effect, Reading
from attnres.app.state import ATTENDED, LARGEST, LOSS, Cut
from attnres.app.steps import Learned
from attnres.inspect.attention import TokenAttention
from attnres.inspect.attribution import Attribution
from attnres.inspect.colours import LESS, MORE, MUTED, blend, colours_by_name, ink_on
from attnres.inspect.corpus import Search
from attnres.inspect.notebook import FLOOR
from attnres.inspect.routing import By
from attnres.inspect.steps import StepChange
from attnres.residuals import Read
from attnres.text import number, short

PAPER = "#ffffff"
BEFORE = "#8a94a3"
"""Of bars that an edit is compared with."""
NAMED = 3
"""Sources of a read that a token names when it is pointed at."""
FULL = 0.65
"""Of a colour in the largest number's background: text stays readable on it."""


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
        scores: of the edges of the prediction after the token, where they were measured.
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
    attention: TokenAttention | None = None
    scores: Attribution | None = None
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


@dataclass(frozen=True)
class Scales:
    """Where the scales of all panes end, so that a colour or a length is one number on the whole page.

    Attributes:
        loss: nats of change of a token's loss. part: of the source that colours the tokens. probability: of a next
            token. span: both ends of the bars. score: nats of change of ln p.
    """

    loss: float
    part: float
    probability: float
    span: tuple[float, float]
    score: float

    @classmethod
    def of(cls, panes: Sequence[Pane]) -> "Scales":
        """The least that holds every pane; what is smaller than `FLOOR` stays pale."""

        def most(values: Sequence[np.ndarray], floor: float) -> float:
            return max([floor, *(float(np.abs(one).max(initial=0)) for one in values)])

        shown = [p.reading.rows(p.by)[p.read][:, _place_of(p)] for p in panes if _place_of(p) is not None]
        chances = np.array([chance or 0.0 for p in panes for c in p.candidates for chance in (c.before, c.after)])
        negative = [float(np.minimum(row, 0).sum()) for p in panes for row in p.parts]
        positive = [float(np.maximum(row, 0).sum()) for p in panes for row in p.parts]
        return cls(
            loss=most([_loss_change(p) for p in panes], FLOOR),
            part=most(shown, FLOOR),
            probability=most([chances], 0.01),
            span=(min([0.0, *negative]), max([1.0, *positive])),
            score=most([np.array(row) for p in panes if p.scores is not None for row in p.scores.knockout], FLOOR),
        )


def visible(piece: str) -> str:
    """A token's text with what cannot be seen made visible: spaces at its ends, line ends, tabs, control characters."""
    words = piece.strip(" ")
    front = len(piece) - len(piece.lstrip(" "))
    shown = "␣" * front + words + "␣" * (len(piece) - front - len(words))
    shown = shown.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 else "␡" if ord(c) == 127 else c for c in shown) or "∅"


def message(text: str, kind: str = "error") -> str:
    """A sentence for the reader, or nothing."""
    return f'<p class="{escape(kind)}" role="status">{escape(text[:1].upper() + text[1:])}</p>' if text else ""


def pane(p: Pane, scales: Scales) -> str:
    """Everything the page shows of one model."""
    title = visible(p.title)
    colours = colours_by_name(p.reading.layout)
    of_token, of_text = f"of {p.of_token}", "mean over the text"
    if p.by == "contribution":
        depth, mean = f"What the reads {of_token} are made of", f"What the reads are made of, {of_text}"
    else:
        depth, mean = f"Weights of the reads {of_token}", f"Weights of the reads, {of_text}"
    means, short_names = p.reading.means(p.by), figures.key(p.reading.layout)
    bars = figures.stack(
        p.reading.layout,
        p.parts,
        colours,
        f"{depth}, {title}",
        lambda r, i: _edge_words(p, r, i, p.token),
        span=scales.span,
        out=p.cut_at(p.token),
    )
    cells = figures.heatmap(
        p.reading.layout,
        means,
        f"{mean}, {title}",
        lambda r, i: _edge_words(p, r, i, None),
        out=p.cut_at(None),
        once=p.cut_once,
    )
    rows = f"Rows are reads, bars their sources: {short_names}. Every edge in place."
    if scales.span[0] < 0:
        rows += " Left of the line: sources that point against the read."
    share = "how much of the read it is, by projection on it" if p.by == "contribution" else "the weight it is given"
    click = f"Rows are reads, columns sources: {share}, every edge in place. Click a cell to knock its edge out."
    left = [
        _section(p.title, "next", f"Next token after {p.of_token}", _next(p, scales)),
        _section(p.title, "stack", f"{depth}, through depth", bars, rows, save=True),
        _section(p.title, "attended", f"What {p.of_token} attends to, over the text", *_attention(p), save=True),
    ]
    right = [
        _section(p.title, "contributions", mean, cells, click, save=True),
        _section(
            p.title, "scores", f"What the prediction after {p.of_token} depends on", *_scores(p, scales), save=True
        ),
        _section(
            p.title,
            "graph",
            f"How the prediction after {p.of_token} is made",
            p.graph,
            "The largest of these edges that lead to it, each measured alone; depth runs downwards.",
            save=True,
        ),
    ]
    right.append(_queries(p.title, p.similarity))
    return (
        f'<article class="pane" data-model="{p.number}" data-place="{p.place}" aria-label="{escape(title)}">'
        f"{_head(p)}{_effect(p)}{_cuts(p)}"
        f"{_section(p.title, 'tokens', _colouring(p), _tokens(p, colours, scales) + _legend(p, colours, scales))}"
        f'<div class="body"><div>{"".join(left)}</div><div>{"".join(right)}</div></div></article>'
    )


def learned(number: int, place: int, model: Learned, why: str) -> str:
    """What the page shows of a step of which the residual alone was kept; `why` says that there is no more."""
    title = visible(model.label)
    head = f'<h2>{escape(title)}</h2><p class="details">{escape(model.details)}</p>{message(why, "note")}'
    return (
        f'<article class="pane" data-model="{number}" data-place="{place}" aria-label="{escape(title)}">'
        f'<header>{head}</header><div class="body">{_queries(model.label, model.similarity)}</div></article>'
    )


def learned_between(change: StepChange, name: str) -> str:
    """What a run's residual learned between the two steps shown: sharpness at both, and how far each query turned."""
    if not any(change.after) and not any(change.before):
        moved = "; ".join(f"{table} changed by {largest:.3g} at most" for table, largest in change.tables.items())
        return message(
            f"from step {change.first:,} to {change.last:,} {moved or 'the residual learned nothing'}", "note"
        )
    largest = max(value or 0.0 for value in (*change.before, *change.after))
    rows = []
    for read, turned, *sharp in zip(change.layout, change.turned, change.before, change.after, strict=True):
        bars = "".join(_bar(value or 0.0, largest, colour) for value, colour in zip(sharp, (BEFORE, MUTED)))
        words = f"{short(sharp[0])} → {short(sharp[1])}, cosine {short(turned)}"
        rows.append(
            f'<tr><th scope="row">{escape(figures.row_name(read))}</th><td class="bars">{bars}</td>'
            f'<td class="number">{words}</td></tr>'
        )
    note = (
        f"Sharpness of each read, the largest logit that its query can give, at step {change.first:,} (above) and "
        f"{change.last:,}, and the cosine of its query at both: 1 where it did not turn."
    )
    return _section(
        name, "learned", "What the residual learned between the steps", f"<table>{''.join(rows)}</table>", note
    )


def _queries(of: str, similarity: tuple[list[Read], np.ndarray] | None) -> str:
    """Which reads ask alike; nothing where there are no queries."""
    if similarity is None:
        return ""
    cells = figures.similarity(*similarity, f"Cosines between pseudo-queries, {visible(of)}")
    note = "Cosines between the vectors by which reads choose their sources."
    return _section(of, "queries", "Pseudo-queries: how alike", cells, note, save=True)


def _section(of: str, name: str, title: str, body: str, note: str = "", save: bool = False) -> str:
    """A part of the page; `of` is the model's title."""
    if not body:
        return ""
    of = escape(f"of “{title}”, {visible(of)}", quote=True)
    buttons = "".join(
        f'<button type="button" class="save" data-save="{kind}" aria-label="{kind.upper()} {of}">{kind.upper()}'
        "</button>"
        for kind in ("svg", "png")
    )
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    saving = f'<span class="saving">{buttons}</span>' if save and "<svg" in body else ""
    return f'<section class="{name}"><h3>{escape(title)}{saving}</h3>{note}{body}</section>'


def _edge_words(p: Pane, read: int, source: int, token: int | None) -> str:
    """An edge's numbers, at one token or on average."""
    rows = (p.reading.contributions[read], p.reading.weights[read])
    part, weight = (float(row[:, source].mean() if token is None else row[token, source]) for row in rows)
    names = p.reading.reads[read], p.reading.sources[read][source]
    return f"{names[0]} reads {names[1]}: contribution {part:.3f}, weight {weight:.3f}"


def _head(p: Pane) -> str:
    notes = "".join(message(note, "note") for note in p.reading.notes)
    details = f'<p class="details">{escape(visible(p.details))}</p>'
    return f"<header><h2>{escape(visible(p.title))}</h2>{details}{notes}</header>"


def _effect(p: Pane) -> str:
    """What the knock-outs do, in two lines that stay in sight."""
    after = ""
    if p.candidates:
        best = p.candidates[0]
        after = f"after {p.of_token}: “{visible(best.piece)}” {best.before:.3f}"
        if p.effect is not None and best.after is not None:
            after += f" → {best.after:.3f}"
        after = escape(after)
        if p.effect is not None:
            after += f'; <span data-tip="sum p ln(p/q), p before and q after">KL {kl_divergence(p):.3f} nats</span>'
    return f'<div class="effect"><p class="loss">{summary(p)}</p><p class="after">{after}</p></div>'


def summary(p: Pane) -> str:
    """The text's loss, and what knock-outs do to it."""
    loss = p.reading.loss
    if loss is None:
        return "one token, no loss"
    if p.effect is None:
        return f"loss {loss:.3f} nats per token"
    change = float(p.effect.losses.mean()) - loss
    count = f"{len(p.cuts)} edge{'s' if len(p.cuts) > 1 else ''}"
    return f"loss {loss:.3f} → <b>{loss + change:.3f}</b> nats ({number(change, signed=True)}) without {count}"


def _cuts(p: Pane) -> str:
    """What is knocked out, each to be brought back."""
    items = []
    for cut in p.cuts:
        where = "at all tokens"
        if cut.token is not None:
            names = p.reading.names
            word = f" “{visible(names[cut.token])}”" if cut.token < len(names) else ", which this text has not"
            where = f"at token {cut.token}{word}"
        edge = f"{p.reading.reads[cut.read]} ← {p.reading.sources[cut.read][cut.source]}"
        token = "" if cut.token is None else f' data-at="{cut.token}"'
        items.append(
            f'<li>{escape(edge)} <span class="where">{escape(where)}</span> <button type="button" data-back="" '
            f'data-of-read="{cut.read}" data-of-source="{cut.source}"{token} '
            f'aria-label="bring back {escape(f"{edge} {where}")}">×</button></li>'
        )
    if not items:
        return '<p class="cuts note">Nothing is knocked out.</p>'
    return f'<ul class="cuts" aria-label="knocked out">{"".join(items)}</ul>'


def _place_of(p: Pane) -> int | None:
    """The number of the source that colours the tokens, where that is one of the read's."""
    names = p.reading.sources[p.read]
    return names.index(p.source) if p.source in names else None


def _colouring(p: Pane) -> str:
    read = p.reading.reads[p.read]
    read = "the output's read" if read == "output" else f"the read of {read}"
    if p.source == LOSS:
        return "Tokens by the change of their loss"
    if p.source == ATTENDED:
        return f"Tokens by the attention of {p.of_token}, mean over heads and layers"
    if _place_of(p) is None:
        return f"Tokens by the largest source of {read}, by {p.by}"
    return f"Tokens by the {p.by} of {p.source} in {read}"


def _tokens(p: Pane, colours: dict[str, str], scales: Scales) -> str:
    fills = _fills(p, colours, scales)
    rows, names = p.reading.rows(p.by)[p.read], p.reading.sources[p.read]
    parts = []
    for i, piece in enumerate(p.reading.pieces):
        order = np.argsort(-np.abs(rows[i]))[:NAMED]
        largest = ", ".join(f"{names[j]} {short(float(rows[i][j]))}" for j in order)
        verb = "is made of" if p.by == "contribution" else "weighs"
        tip = f"token {i} “{visible(p.reading.names[i])}” {verb} {largest}"
        if i:
            tip += f"; loss {p.reading.losses[i - 1]:.2f}"
            if p.effect is not None:
                tip += f" → {p.effect.losses[i - 1]:.2f}"
        pressed = ' aria-pressed="true"' if i == p.token else ' aria-pressed="false"'
        words = _inline(piece) if piece or p.reading.names[i] == piece else "·"
        parts.append(
            f'<span class="token" role="button" tabindex="{0 if i == p.token else -1}" data-token="{i}"{pressed} '
            f'style="background:{fills[i]};color:{ink_on(fills[i])}" data-tip="{escape(tip)}">{escape(words)}</span>'
        )
    return f'<div class="text">{"".join(parts)}</div>'


def _inline(piece: str) -> str:
    """A token's text within the text: spaces stay spaces and lines end, so that the text reads as it is."""
    lines = [" ".join(visible(word) if word else "" for word in line.split(" ")) for line in piece.split("\n")]
    return "↵\n".join(lines) if piece else visible(piece)


def _fills(p: Pane, colours: dict[str, str], scales: Scales) -> list[str]:
    """A background for each token."""
    if p.source == LOSS:
        return [PAPER] + [_shade(-change, scales.loss) for change in _loss_change(p)]
    if p.source == ATTENDED:
        return [_shade(part, 1.0) for part in _attended(p)]
    rows, names, place = p.reading.rows(p.by)[p.read], p.reading.sources[p.read], _place_of(p)
    if place is not None:
        return [_shade(part, scales.part) for part in rows[:, place]]
    if _alike(p):
        return [PAPER] * len(rows)
    return [colours[names[j]] for j in rows.argmax(1)]


def _shade(value: float, largest: float) -> str:
    """Blue of more, orange of less, over the root of the size."""
    return blend(PAPER, MORE if value > 0 else LESS, FULL * min(1.0, abs(float(value)) / largest) ** 0.5)


def _attended(p: Pane) -> np.ndarray:
    """(T,) attention of the chosen token, mean over heads and layers; zeros where the model shows none."""
    if p.attention is None:
        return np.zeros(len(p.reading.pieces))
    return p.attention.mean[:, p.token].mean(0).numpy()


def _alike(p: Pane) -> bool:
    """Whether no source weighs more than another, as in a plain sum."""
    sizes = np.abs(p.reading.weights[p.read])
    return p.by == "weight" and sizes.shape[1] > 1 and bool(np.allclose(sizes, sizes[:, :1]))


def _loss_change(p: Pane) -> np.ndarray:
    return p.effect.losses - p.reading.losses if p.effect is not None else np.zeros_like(p.reading.losses)


def _legend(p: Pane, colours: dict[str, str], scales: Scales) -> str:
    names, place = p.reading.sources[p.read], _place_of(p)
    if p.source == LOSS:
        if p.effect is None:
            return '<p class="legend">Nothing is knocked out: no loss has changed. Click a cell.</p>'
        return _ramp(-scales.loss, scales.loss, "nats: orange is worse without it, blue better", flip=True)
    if p.source == ATTENDED:
        return _ramp(0.0, 1.0, "of the attention" if p.attention is not None else "this model shows no attention")
    if place is not None:
        column = p.reading.rows(p.by)[p.read][:, place]
        low = -scales.part if column.min(initial=0) < 0 else 0.0
        return _ramp(low, scales.part, f"{p.by}; mean {float(column.mean()):.2f}")
    if _alike(p):
        return (
            '<p class="legend">All sources of this read weigh the same: none is the largest. Knock one out, and '
            "colour tokens by the change in loss.</p>"
        )
    counts = np.bincount(p.reading.rows(p.by)[p.read].argmax(1), minlength=len(names))
    shown = [j for j in np.argsort(-counts) if counts[j]]
    words = [f"{_swatch(colours[names[j]])} {escape(names[j])} ({counts[j]})" for j in shown]
    missing = "" if p.source == LARGEST else f"This read has no source {escape(p.source)}: by its largest instead. "
    return f'<p class="legend">{missing}{" ".join(f"<span>{word}</span>" for word in words)}</p>'


def _ramp(low: float, high: float, words: str, flip: bool = False) -> str:
    """A scale with both its ends."""
    ends = [_shade((-1 if flip else 1) * value, high) for value in (low, (low + high) / 2, high)]
    return (
        f'<p class="legend">{low:.3g} <i class="ramp" style="background:linear-gradient(90deg,{",".join(ends)})"></i> '
        f"{high:.3g} {escape(words)}</p>"
    )


def _swatch(colour: str) -> str:
    return f'<i class="swatch" style="background:{colour}"></i>'


def _next(p: Pane, scales: Scales) -> str:
    """The likeliest next tokens as bars; with a knock-out, before above after."""
    rows = []
    for c in p.candidates:
        bars = _bar(c.before, scales.probability, MUTED if c.after is None else BEFORE)
        words = f"{c.before:.3f}"
        if c.after is not None:
            same = f"{c.after:.3f}" == f"{c.before:.3f}"  # in the digits that are shown
            bars += _bar(c.after, scales.probability, BEFORE if same else LESS if c.after < c.before else MORE)
            words = f"{c.before:.3f} → {c.after:.3f}"
        rows.append(
            f'<tr><th scope="row">{escape(visible(c.piece))}</th><td class="bars">{bars}</td>'
            f'<td class="number">{words}</td></tr>'
        )
    line, after = "The text ends here.", p.token + 1
    if after < len(p.reading.pieces):
        line = f"The text goes on with “{visible(p.reading.names[after])}”, loss {p.reading.losses[p.token]:.2f}"
        line += f" → {p.effect.losses[p.token]:.2f}." if p.effect is not None else "."
    change = "Click a bar or a cell to see what it changes here."
    if p.effect is not None:
        change = f"{_swatch(BEFORE)} before {_swatch(MORE)} risen {_swatch(LESS)} fallen"
    return f'<p class="note">{escape(line)}</p><p class="note">{change}</p><table>{"".join(rows)}</table>'


def kl_divergence(p: Pane) -> float:
    """sum p ln(p/q) in nats at the chosen token, p the distribution before, q the one after."""
    if p.effect is None:
        return 0.0
    before, after = p.reading.log_probs[p.token].double(), p.effect.log_probs[p.token].double()
    return float((before.exp() * (before - after)).sum().clamp_min(0.0))


def _bar(share: float, largest: float, colour: str) -> str:
    return f'<i style="width:{max(0.5, 100 * share / largest):.1f}%;background:{colour}"></i>'


def _attention(p: Pane) -> tuple[str, str]:
    """Attention over tokens beside depth, and what is said of it."""
    if p.attention is None:
        return "", ""
    shown = p.token + 1
    rows = {
        "mean over heads": p.attention.mean[:, p.token, :shown].numpy(),
        "largest of the heads": p.attention.largest[:, p.token, :shown].numpy(),
    }
    names = [visible(name) for name in p.reading.names[:shown]]
    title = f"Attention of {p.of_token}, {visible(p.title)}"
    body = figures.attention(p.attention.layers, rows, names, title)
    return body, "Rows are layers, columns the tokens up to it; every edge in place. Colours over the root, up to 1."


def _scores(p: Pane, scales: Scales) -> tuple[str, str]:
    """Every edge cut alone, as cells and as a graph; the button that measures them before."""
    if p.scores is None:
        count = sum(map(len, p.reading.sources))
        return (
            f'<button type="button" class="score" data-score="" aria-label="score all {count} edges of the prediction '
            f'after {escape(p.of_token)}, {escape(visible(p.title))}">score all {count} edges</button>'
            '<progress hidden="" max="1" value="0"></progress>',
            "Each edge is knocked out alone, at all tokens, with all others in place.",
        )
    one, numbers = p.scores, [np.array(row) for row in p.scores.knockout]
    cells = figures.heatmap(
        one.layout,
        numbers,
        f"Change of ln p after {p.of_token} without each edge, {visible(p.title)}",
        lambda r, i: (
            f"{one.reads[r]} reads {one.sources[r][i]}: ln p {short(float(numbers[r][i]), 3, signed=True)} without it"
        ),
        name="scores",
        largest=scales.score,
        out=p.cut_at(None),
        once=p.cut_once,
    )
    target = "" if p.token + 1 >= len(p.reading.names) else f" of “{visible(p.reading.names[p.token + 1])}”"
    note = (
        f"Change of ln p{target} ({one.log_probability:.3f}) without each edge, in nats, measured: orange is what it "
        "relies on."
    )
    return cells, note


def difference(first: Pane, second: Pane) -> str:
    """The second pane less the first: what reads are made of, and the next token."""
    theirs = second.reading.means(second.by)
    place = {
        (read.name, source.name): (r, i)
        for r, read in enumerate(second.reading.layout)
        for i, source in enumerate(read.sources)
    }
    mine, layout, values = first.reading.means(first.by), list[Read](), list[np.ndarray]()
    for r, read in enumerate(first.reading.layout):
        both = [i for i, source in enumerate(read.sources) if (read.name, source.name) in place]
        at = [place[read.name, read.sources[i].name] for i in both]
        if both:
            layout.append(read._replace(sources=tuple(read.sources[i] for i in both)))
            values.append(np.array([theirs[j][k] - mine[r][i] for i, (j, k) in zip(both, at, strict=True)]))
    if not values:
        return message("these two models have no read and source in common: there is no difference to show", "note")
    largest = max(FLOOR, float(np.abs(np.concatenate(values)).max()))
    cells = figures.heatmap(
        layout,
        values,
        f"Difference of {first.by}s, second less first",
        lambda r, i: (
            f"{layout[r].name} reads {layout[r].sources[i].name}: {first.by} {number(float(values[r][i]), signed=True)}"
        ),
        name="difference",
        largest=largest,
        click=False,
    )
    losses = [p.reading.loss for p in (first, second)]
    change = ""
    if losses[0] is not None and losses[1] is not None:
        apart = number(losses[1] - losses[0], signed=True)
        change = f"Loss {losses[0]:.3f} and {losses[1]:.3f} nats per token, {apart}. "
    note = (
        f"{change}Mean {first.by} over the text, second less first, every edge in place: blue where the second reads "
        "more of it, orange less. Edges that only one of them has are left out."
    )
    return _section(first.title, "difference", "Difference: second less first", cells, note, save=True)


def results(result: Search, title: str) -> str:
    """Tokens of a corpus, each to be looked at."""
    rows = []
    for place, hit in enumerate(result.hits):
        number = short(getattr(hit, result.by), 3)
        rows.append(
            f'<tr><td class="number">{number}</td><td class="before">{escape(hit.before)}</td>'
            f'<td><button type="button" data-hit="{place}">{escape(visible(hit.token))}</button></td>'
            f'<td class="after">{escape(hit.after)}</td></tr>'
        )
    how = "least" if result.least else "most"
    words = (
        f"{title}: where {result.source} is {how} of the read of {result.read}, by {result.by}; "
        f"{result.tokens:,} tokens of {result.documents:,} documents, mean {short(result.mean, 3)}. "
        f"Click a token to look at its text."
    )
    return f'<p class="note">{escape(visible(words))}</p><table class="hits">{"".join(rows)}</table>'


def live(panes: Sequence[Pane]) -> str:
    """What has changed, for those who do not see it; plain text."""
    plain = [summary(p).replace("<b>", "").replace("</b>", "") for p in panes]
    return "; ".join(f"{visible(p.title)}: {words}" for p, words in zip(panes, plain, strict=True))


def export(panes: Sequence[Pane]) -> dict[str, object]:
    """What the page shows, as numbers for a JSON file."""
    return {
        "format": 2,
        "models": [
            {
                "name": p.title,
                "details": p.details,
                "tokens": p.reading.pieces,
                "ids": list(p.reading.ids),
                "reads": p.reading.reads,
                "sources": p.reading.sources,
                "weights": [np.round(row.astype(float), 6).tolist() for row in p.reading.weights],
                "contributions": [np.round(row.astype(float), 6).tolist() for row in p.reading.contributions],
                "losses": np.round(p.reading.losses, 6).tolist(),
                "knocked_out": [
                    {"read": p.reading.reads[c.read], "source": p.reading.sources[c.read][c.source], "token": c.token}
                    for c in p.cuts
                ],
                "losses_after": np.round(p.effect.losses, 6).tolist() if p.effect is not None else None,
                "token": p.token,
                "next": [{"token": c.piece, "before": c.before, "after": c.after} for c in p.candidates],
                "divergence": kl_divergence(p) if p.effect is not None else None,
                "query_cosine": p.similarity[1].round(6).tolist() if p.similarity is not None else None,
                "scores": p.scores.to_dict() if p.scores is not None else None,
            }
            for p in panes
        ],
    }
