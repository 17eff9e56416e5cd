"""What the page shows of one model, as HTML: analyses in, strings out, all text escaped; no model runs here."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from attnres.app import figures
from attnres.app.explorer import Candidate, Effect, Reading
from attnres.app.state import HEAVIEST, LOSS
from attnres.inspect.colours import LESS, MORE, MUTED, blend, colours_by_name, ink_on
from attnres.residuals import Read

PAPER = "#ffffff"
BEFORE = "#8a94a3"
"""Of bars that an edit is compared with."""
NAMED = 3
"""Sources of a read that a token names when it is pointed at."""


@dataclass(frozen=True)
class Pane:
    """One model's half of the page.

    Attributes:
        number: the model's. title, details: its name, and what it is.
        read, source: what colours the tokens (see `View`).
        edges: (read, source) knocked out; `effect` what that does.
        candidates: next tokens of the chosen `token`.
        similarity: reads and the cosines of their pseudo-queries.
    """

    number: int
    title: str
    details: str
    reading: Reading
    read: int
    source: str
    token: int
    edges: frozenset[tuple[int, int]]
    effect: Effect | None
    candidates: list[Candidate]
    similarity: tuple[list[Read], np.ndarray] | None


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


def pane(p: Pane) -> str:
    """Everything the page shows of one model."""
    token, title = visible(p.reading.pieces[p.token]), visible(p.title)
    colours = colours_by_name(p.reading.layout)
    row = [weights[p.token] for weights in p.reading.weights]
    of_token = f"“{token}” (token {p.token})"
    bars = figures.stack(p.reading.layout, row, colours, p.edges, f"Weights of the reads of {of_token}, {title}")
    cells = figures.heatmap(
        p.reading.layout,
        p.reading.mean_contributions,
        p.reading.means,
        p.edges,
        f"What reads are made of, mean over this text, {title}",
    )
    short = f"Rows are reads, bars their sources: {figures.key(p.reading.layout)}."
    left = [
        _section("next", f"Next token after {of_token}", _next(p)),
        _section("stack", f"Weights of the reads of {of_token}, through depth", bars, short, save=True),
    ]
    click = (
        "Rows are reads, columns sources: how much of the read a source is, by projection on it, with every edge in "
        "place. Pointing at a cell tells its weight too. Click a cell to knock its edge out, again to bring it back."
    )
    right = [_section("contributions", "What reads are made of, mean over the text", cells, click, save=True)]
    if p.similarity is not None:
        reads, cosines = p.similarity
        queries = figures.similarity(reads, cosines, f"Cosines between pseudo-queries, {title}")
        alike = "Cosines between the vectors by which reads choose their sources."
        right.append(_section("queries", "Pseudo-queries: how alike", queries, alike, save=True))
    return (
        f'<article class="pane" data-model="{p.number}">{_head(p)}'
        f"{_section('tokens', _colouring(p), _tokens(p, colours) + _legend(p, colours))}"
        f'<div class="body"><div>{"".join(left)}</div><div>{"".join(right)}</div></div></article>'
    )


def _section(name: str, title: str, body: str, note: str = "", save: bool = False) -> str:
    buttons = "".join(
        f'<button type="button" class="save" data-save="{kind}">{kind.upper()}</button>' for kind in ("svg", "png")
    )
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    saving = f'<span class="saving">{buttons}</span>' if save else ""
    return f'<section class="{name}"><h3>{escape(title)}{saving}</h3>{note}{body}</section>'


def _head(p: Pane) -> str:
    loss = p.reading.loss
    summary = ""
    if loss is not None:
        summary = f"loss {loss:.3f} nats per token"
        if p.effect is not None:
            change = float(p.effect.losses.mean()) - loss
            edges = f"{len(p.edges)} edge{'s' if len(p.edges) > 1 else ''}"
            summary = f"loss {loss:.3f} → <b>{loss + change:.3f}</b> nats ({change:+.3f}) without {edges}"
    notes = "".join(message(note, "note") for note in p.reading.notes)
    return (
        f'<header><h2>{escape(visible(p.title))}</h2><p class="details">{escape(visible(p.details))}</p>'
        f'<p class="loss">{summary}</p>{notes}</header>'
    )


def _colouring(p: Pane) -> str:
    read = p.reading.reads[p.read]
    read = "the output's read" if read == "output" else f"the read of {read}"
    if p.source == LOSS:
        return "Tokens by the change of their loss"
    if p.source == HEAVIEST:
        return f"Tokens by the source of the largest weight in {read}"
    return f"Tokens by the weight of {p.source} in {read}"


def _tokens(p: Pane, colours: dict[str, str]) -> str:
    fills = _fills(p, colours)
    weights, names = p.reading.weights[p.read], p.reading.sources[p.read]
    parts = []
    for i, piece in enumerate(p.reading.pieces):
        order = np.argsort(-np.abs(weights[i]))[:NAMED]
        heaviest = ", ".join(f"{names[j]} {weights[i][j]:.2f}" for j in order)
        tip = f"token {i} “{visible(piece)}” reads {heaviest}"
        if i:
            tip += f"; loss {p.reading.losses[i - 1]:.2f}"
            if p.effect is not None:
                tip += f" → {p.effect.losses[i - 1]:.2f}"
        pressed = ' aria-pressed="true"' if i == p.token else ""
        parts.append(
            f'<span class="token" role="button" tabindex="{0 if pressed else -1}" data-token="{i}"{pressed} '
            f'style="background:{fills[i]};color:{ink_on(fills[i])}" data-tip="{escape(tip)}">'
            f"{escape(_inline(piece))}</span>"
        )
    return f'<div class="text">{"".join(parts)}</div>'


def _inline(piece: str) -> str:
    """A token's text within the text: spaces stay spaces and lines end, so that the text reads as it is."""
    lines = [" ".join(visible(word) if word else "" for word in line.split(" ")) for line in piece.split("\n")]
    return "↵\n".join(lines) if piece else visible(piece)


def _fills(p: Pane, colours: dict[str, str]) -> list[str]:
    """A background for each token."""
    if p.source == LOSS:
        change = _loss_change(p)
        largest = float(np.abs(change).max(initial=0)) or 1.0
        return [PAPER] + [blend(PAPER, LESS if x > 0 else MORE, 0.7 * abs(x) / largest) for x in change]
    weights, names = p.reading.weights[p.read], p.reading.sources[p.read]
    if p.source == HEAVIEST or p.source not in names:
        if _alike(weights):
            return [PAPER] * len(weights)
        return [colours[names[j]] for j in np.abs(weights).argmax(1)]
    column = np.abs(weights[:, names.index(p.source)])
    largest = float(column.max()) or 1.0
    return [blend(PAPER, MORE, 0.65 * float(x) / largest) for x in column]


def _alike(weights: np.ndarray) -> bool:
    """Whether no source weighs more than another, as in a plain sum."""
    sizes = np.abs(weights)
    return sizes.shape[1] > 1 and bool(np.allclose(sizes, sizes[:, :1]))


def _loss_change(p: Pane) -> np.ndarray:
    return p.effect.losses - p.reading.losses if p.effect is not None else np.zeros_like(p.reading.losses)


def _legend(p: Pane, colours: dict[str, str]) -> str:
    names = p.reading.sources[p.read]
    if p.source == LOSS:
        if p.effect is None:
            return '<p class="legend">Nothing is knocked out: no loss has changed. Click a cell of the weights.</p>'
        largest = float(np.abs(_loss_change(p)).max(initial=0))
        worse, better = (_swatch(blend(PAPER, colour, 0.7)) for colour in (LESS, MORE))
        return f'<p class="legend">{worse} loss up, by {largest:.2f} nats at most {better} loss down</p>'
    if p.source == HEAVIEST or p.source not in names:
        if _alike(p.reading.weights[p.read]):
            return (
                '<p class="legend">All sources of this read weigh the same: none is the heaviest. Knock one out, and '
                "colour tokens by the change in loss.</p>"
            )
        best = np.abs(p.reading.weights[p.read]).argmax(1)
        counts = np.bincount(best, minlength=len(names))
        shown = [j for j in np.argsort(-counts) if counts[j]]
        words = [f"{_swatch(colours[names[j]])} {escape(names[j])} ({counts[j]})" for j in shown]
        missing = (
            "" if p.source == HEAVIEST else f"This read has no source {escape(p.source)}: by its heaviest instead. "
        )
        return f'<p class="legend">{missing}{" ".join(f"<span>{word}</span>" for word in words)}</p>'
    column = np.abs(p.reading.weights[p.read][:, names.index(p.source)])
    ramp = f"linear-gradient(90deg,{PAPER},{blend(PAPER, MORE, 0.65)})"
    return (
        f'<p class="legend">0 <i class="ramp" style="background:{ramp}"></i> {float(column.max()):.2f}; mean '
        f"{float(column.mean()):.2f}</p>"
    )


def _swatch(colour: str) -> str:
    return f'<i class="swatch" style="background:{colour}"></i>'


def _next(p: Pane) -> str:
    """The likeliest next tokens as bars; with a knock-out, before above after."""
    largest = max([c.before for c in p.candidates] + [c.after or 0.0 for c in p.candidates]) or 1.0
    rows = []
    for c in p.candidates:
        bars = _bar(c.before, largest, MUTED if c.after is None else BEFORE)
        words = f"{c.before:.3f}"
        if c.after is not None:
            same = abs(c.after - c.before) < 0.0005  # in the digits that are shown
            bars += _bar(c.after, largest, BEFORE if same else LESS if c.after < c.before else MORE)
            words = f"{c.before:.3f} → {c.after:.3f}"
        rows.append(
            f'<tr><th scope="row">{escape(visible(c.piece))}</th><td class="bars">{bars}</td>'
            f'<td class="number">{words}</td></tr>'
        )
    line, after = "The text ends here.", p.token + 1
    if after < len(p.reading.pieces):
        line = f"The text goes on with “{visible(p.reading.pieces[after])}”, loss {p.reading.losses[p.token]:.2f}"
        line += f" → {p.effect.losses[p.token]:.2f}." if p.effect is not None else "."
    change = "Click a bar or a cell to see what it changes here."
    if p.effect is not None:
        kl = f'<span data-tip="sum p ln(p/q), p before and q after">KL {kl_divergence(p):.3f} nats</span>'
        change = f"{_swatch(BEFORE)} before {_swatch(MORE)} risen {_swatch(LESS)} fallen; {kl}"
    return f'<p class="note">{escape(line)}</p><p class="note">{change}</p><table>{"".join(rows)}</table>'


def kl_divergence(p: Pane) -> float:
    """sum p ln(p/q) in nats at the chosen token, p the distribution before, q the one after."""
    if p.effect is None:
        return 0.0
    before, after = p.reading.log_probs[p.token].double(), p.effect.log_probs[p.token].double()
    return float((before.exp() * (before - after)).sum().clamp_min(0.0))


def _bar(share: float, largest: float, colour: str) -> str:
    return f'<i style="width:{max(0.5, 100 * share / largest):.1f}%;background:{colour}"></i>'


def export(panes: Sequence[Pane]) -> dict[str, object]:
    """What the page shows, as numbers for a JSON file."""
    return {
        "format": 1,
        "models": [
            {
                "name": p.title,
                "details": p.details,
                "tokens": p.reading.pieces,
                "ids": list(p.reading.ids),
                "reads": p.reading.reads,
                "sources": p.reading.sources,
                "weights": [np.round(row.astype(float), 6).tolist() for row in p.reading.weights],
                "mean_contributions": [np.round(row.astype(float), 6).tolist() for row in p.reading.mean_contributions],
                "mean_weights": [np.round(row.astype(float), 6).tolist() for row in p.reading.means],
                "losses": np.round(p.reading.losses, 6).tolist(),
                "knocked_out": [
                    {"read": p.reading.reads[r], "source": p.reading.sources[r][i]} for r, i in sorted(p.edges)
                ],
                "losses_after": np.round(p.effect.losses, 6).tolist() if p.effect is not None else None,
                "token": p.token,
                "next": [{"token": c.piece, "before": c.before, "after": c.after} for c in p.candidates],
                "divergence": kl_divergence(p) if p.effect is not None else None,
                "query_cosine": p.similarity[1].round(6).tolist() if p.similarity is not None else None,
            }
            for p in panes
        ],
    }
