"""SVG figures of the page, drawn by hand so that every cell can be pointed at and clicked; each stands on its own.

An edge says what it is in `aria-label` (shown when it is pointed at), and in `data-read` and `data-source` what a click
knocks out. Other cells have a `data-tip`. All text is escaped.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from attnres.app.colours import GRID, INK, MUTED, OUT, PAPER, ink_on, signed_colour, weight_colour

WIDTH = 370.0
"""Of every figure, in units of its own; a phone shows it at about one unit a pixel."""
LABEL = 46.0
"""For the names of rows."""
RIGHT = 14.0
"""For the last column's name, which is slanted."""
FONT = "font-family='system-ui,sans-serif'"
_SHORT = {
    "embedding": "emb",
    "attention": "a",
    "mlp": "m",
    "block": "b",
    "partial": "part",
    "stream": "str",
    "state": "s",
}
_SAID = {"partial": "the block in progress", "stream": "the running sum"}


def short(source: str) -> str:
    """The name of a source in a few letters: emb, b3, part, a4, m4."""
    kind, _, number = source.partition(" ")
    return f"{_SHORT.get(kind, kind)}{number}"


def key(sources: Sequence[Sequence[str]]) -> str:
    """What the short names mean: "emb embedding, b block, part the block in progress"."""
    kinds = dict.fromkeys(name.partition(" ")[0] for name in columns_of(sources))
    return ", ".join(f"{_SHORT[kind]} {_SAID.get(kind, kind)}" for kind in kinds if kind in _SHORT)


def row_name(read: str) -> str:
    """The name of a read beside its row: attn 3, mlp 3, output."""
    return read.replace("attention", "attn")


def columns_of(rows: Sequence[Sequence[str]]) -> list[str]:
    """Every source once, in an order that agrees with the rows' own: each goes behind what stands before it."""
    order: list[str] = []
    for row in rows:
        for before, name in zip(["", *row], row):
            if name not in order:
                order.insert(order.index(before) + 1 if before else 0, name)
    for last in ("partial", "stream", "null"):  # what is still open comes after what is finished
        if last in order:
            order.append(order.pop(order.index(last)))
    return order


def svg(name: str, title: str, height: float, parts: Iterable[str], role: str = "group") -> str:
    """A figure with a name for its file and a title for those who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="{role}" aria-label="{escape(title)}" data-figure="{name}" '
        f'viewBox="0 0 {WIDTH:g} {height:g}" {FONT} font-size="9.5" fill="{INK}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = MUTED, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {extra}>{escape(words)}</text>'


def _spacing(cell: float) -> int:
    """Every how many rows or columns a name fits."""
    return math.ceil(10.5 / cell)


def heatmap(
    reads: Sequence[str],
    sources: Sequence[Sequence[str]],
    means: Sequence[np.ndarray],
    out: frozenset[tuple[int, int]],
    title: str,
) -> str:
    """Mean weights: a row for each read, a column for each source, with a cross on what is knocked out."""
    columns = columns_of(sources)
    place = {name: i for i, name in enumerate(columns)}
    wide = (WIDTH - LABEL - RIGHT) / len(columns)
    tall = min(14.0, max(9.0, wide))
    top = 30.0
    largest = max(1.0, max(float(np.abs(row).max(initial=0)) for row in means))
    parts, crosses = [], []
    every = _spacing(wide)
    for i, name in enumerate(columns):
        if i % every == 0 or (i == len(columns) - 1 and (len(columns) - 1) % every >= every / 2):
            x = LABEL + (i + 0.5) * wide + 3
            parts.append(_text(x, top - 4, short(name), extra=f'transform="rotate(-60 {x:.1f} {top - 4:.1f})"'))
    every = _spacing(tall)
    for r, read in enumerate(reads):
        y = top + r * tall
        if r % every == 0 or r == len(reads) - 1:
            parts.append(_text(LABEL - 5, y + tall / 2 + 3.3, row_name(read), "end"))
        for i, name in enumerate(sources[r]):
            x = LABEL + place[name] * wide
            weight = float(means[r][i])
            box = (x, y, wide - 0.6, tall - 0.6)
            gone = (r, i) in out
            words = f"{read} reads {name}: {weight:.3f}"
            parts.append(_edge(r, i, box, weight_colour(weight, largest), words, gone))
            crosses += [_cross(box)] * gone
    bottom = top + len(reads) * tall + 8
    parts.append(_scale(bottom, largest))
    return svg("weights", title, bottom + 22, parts + crosses)


Box = tuple[float, float, float, float]
"""x, y, width, height."""


def _place(box: Box) -> str:
    x, y, width, height = box
    return f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}"'


def _edge(read: int, source: int, box: Box, colour: str, words: str, gone: bool) -> str:
    """A cell to click; the figure's first is where the tabulator key stops, arrow keys lead to the others."""
    words = escape(words + (" (knocked out)" if gone else ""))
    return (
        f'<rect class="edge{" gone" if gone else ""}" {_place(box)} fill="{colour}" data-read="{read}" '
        f'data-source="{source}" role="button" tabindex="{0 if read == source == 0 else -1}" aria-label="{words}"/>'
    )


def _cross(box: Box) -> str:
    """On what is knocked out."""
    x, y, width, height = box
    lines = f'd="M{x:.2f} {y:.2f}l{width:.2f} {height:.2f}m0 {-height:.2f}l{-width:.2f} {height:.2f}"'
    return (
        f'<g pointer-events="none" fill="none"><rect {_place(box)} stroke="{OUT}" stroke-width="1.4"/>'
        f'<path {lines} stroke="{PAPER}" stroke-width="2.6"/><path {lines} stroke="{OUT}" stroke-width="1.4"/></g>'
    )


def _scale(y: float, largest: float) -> str:
    """The scale of weights: colours over the square root, with the numbers themselves below."""
    steps, width = 40, WIDTH - LABEL - RIGHT
    parts = [_text(LABEL - 5, y + 6, "weight", "end")]
    parts += [
        f'<rect x="{LABEL + i * width / steps:.2f}" y="{y:.1f}" width="{width / steps + 0.3:.2f}" height="6" '
        f'fill="{weight_colour(((i + 0.5) / steps) ** 2)}"/>'
        for i in range(steps)
    ]
    for share in (0.0, 0.05, 0.25, 0.5, 1.0):
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        parts.append(_text(LABEL + share**0.5 * width, y + 16, f"{share * largest:g}", anchor))
    return "".join(parts)


def stack(
    reads: Sequence[str],
    sources: Sequence[Sequence[str]],
    weights: Sequence[np.ndarray],
    colours: dict[str, str],
    out: frozenset[tuple[int, int]],
    title: str,
) -> str:
    """One token's reads through depth: a bar for each read, from the first to the output, cut by its sources.

    Bars are as long as one another: a segment is a source's share of the weights' absolute values.
    """
    tall = 13.5 if len(reads) <= 40 else 10.0
    wide = WIDTH - LABEL - 4
    parts, crosses = [], []
    for r, read in enumerate(reads):
        y, x = 4 + r * tall, LABEL
        parts.append(_text(LABEL - 5, y + tall / 2 + 3, row_name(read), "end"))
        total = float(np.abs(weights[r]).sum()) or 1.0
        for i, name in enumerate(sources[r]):
            weight = float(weights[r][i])
            width = abs(weight) / total * wide
            box = (x, y, width - 0.4, tall - 2)
            gone = (r, i) in out
            parts.append(_edge(r, i, box, colours[name], f"{read} reads {name}: {weight:.3f}", gone))
            crosses += [_cross(box)] * gone
            if width > 6 + 5.2 * len(short(name)):
                size = 'font-size="8.5" pointer-events="none"'
                ink = ink_on(colours[name])
                parts.append(_text(x + width / 2, y + tall / 2 + 2, short(name), "middle", ink, size))
            x += width
    return svg("stack", title, 8 + len(reads) * tall, parts + crosses)


def similarity(reads: Sequence[str], cosines: np.ndarray, title: str) -> str:
    """Cosines between the pseudo-queries of all reads."""
    cell = min(18.0, (WIDTH - LABEL - 4) / len(reads))
    parts = []
    every = _spacing(cell)
    for r, read in enumerate(reads):
        y = 4 + r * cell
        if r % every == 0 or (r == len(reads) - 1 and (len(reads) - 1) % every >= every / 2):
            parts.append(_text(LABEL - 5, y + cell / 2 + 3.3, row_name(read), "end"))
        for c, other in enumerate(reads):
            value = float(cosines[r, c])
            parts.append(
                f'<rect x="{LABEL + c * cell:.2f}" y="{y:.2f}" width="{cell:.2f}" height="{cell:.2f}" '
                f'fill="{signed_colour(value)}" stroke="{GRID}" stroke-width="0.3" '
                f'data-tip="{escape(f"{read} and {other}: cosine {value:+.2f}")}"/>'
            )
    y = 4 + len(reads) * cell
    parts.append(_text(LABEL, y + 12, "orange: opposite"))
    parts.append(_text(LABEL + (WIDTH - LABEL) / 2, y + 12, "white: unrelated", "middle"))
    parts.append(_text(WIDTH - 4, y + 12, "blue: alike", "end"))
    return svg("queries", title, y + 18, parts, role="img")
