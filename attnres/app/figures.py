"""SVG figures of the page, drawn by hand so that every cell can be pointed at and clicked; each stands on its own.

An edge says what it is in `aria-label` (shown when it is pointed at), and in `data-read` and `data-source` what a click
knocks out. Other cells have a `data-tip`. All text is escaped.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from attnres.inspect.colours import GRID, INK, LESS, MUTED, PAPER, ink_on, signed_colour
from attnres.residuals import Read, columns

WIDTH = 370.0
"""Of every figure, in units of its own; a phone shows it at about one unit a pixel."""
LABEL = 46.0
"""For the names of rows."""
RIGHT = 14.0
"""For the last column's name, which is slanted."""
FONT = "font-family='system-ui,sans-serif'"


def key(layout: Sequence[Read]) -> str:
    """What the short names mean: "emb embedding, b block, part the block in progress"."""
    kinds = {source.short_kind: source.meaning for source in columns(read.sources for read in layout)}
    return ", ".join(f"{short} {meaning}" for short, meaning in kinds.items())


def row_name(read: Read) -> str:
    """The name of a read beside its row: attn 3, mlp 3, output; attn 3 q of one for the queries."""
    kind = "attn" if read.kind == "attention" else read.kind
    return read._replace(kind=kind, into=read.into and read.into[0]).name


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
    layout: Sequence[Read],
    contributions: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    out: frozenset[tuple[int, int]],
    title: str,
) -> str:
    """Mean contributions, and weights in words: a row for each read, a column for each source, with a cross on what is
    knocked out."""
    across = columns(read.sources for read in layout)
    place = {source.name: i for i, source in enumerate(across)}
    wide = (WIDTH - LABEL - RIGHT) / len(across)
    tall = min(14.0, max(9.0, wide))
    top = 30.0
    parts, crosses = [], []
    every = _spacing(wide)
    for i, source in enumerate(across):
        if i % every == 0 or (i == len(across) - 1 and (len(across) - 1) % every >= every / 2):
            x = LABEL + (i + 0.5) * wide + 3
            parts.append(_text(x, top - 4, source.short, extra=f'transform="rotate(-60 {x:.1f} {top - 4:.1f})"'))
    every = _spacing(tall)
    for r, read in enumerate(layout):
        y = top + r * tall
        if r % every == 0 or r == len(layout) - 1:
            parts.append(_text(LABEL - 5, y + tall / 2 + 3.3, row_name(read), "end"))
        for i, source in enumerate(read.sources):
            x = LABEL + place[source.name] * wide
            part = float(contributions[r][i])
            box = (x, y, wide - 0.6, tall - 0.6)
            gone = (r, i) in out
            words = f"{read.name} reads {source.name}: contribution {part:.3f}, weight {float(weights[r][i]):.3f}"
            parts.append(_edge(r, i, box, _colour(part), words, gone))
            crosses += [_cross(box)] * gone
    bottom = top + len(layout) * tall + 8
    parts.append(_scale(bottom))
    return svg("contributions", title, bottom + 22, parts + crosses)


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
        f'<g pointer-events="none" fill="none"><rect {_place(box)} stroke="{LESS}" stroke-width="1.4"/>'
        f'<path {lines} stroke="{PAPER}" stroke-width="2.6"/><path {lines} stroke="{LESS}" stroke-width="1.4"/></g>'
    )


def _colour(part: float) -> str:
    """Of a contribution: more or less over the root of its size."""
    return signed_colour(float(np.sign(part)) * abs(part) ** 0.5)


def _scale(y: float) -> str:
    """The scale of contributions from -1 to 1: colours over the square root, with the numbers themselves below."""
    steps, width = 40, WIDTH - LABEL - RIGHT
    places = [(i + 0.5) / steps * 2 - 1 for i in range(steps)]
    parts = [
        f'<rect x="{LABEL + i * width / steps:.2f}" y="{y:.1f}" width="{width / steps + 0.3:.2f}" height="6" '
        f'fill="{signed_colour(place)}"/>'
        for i, place in enumerate(places)
    ]
    for part in (-1.0, -0.25, 0.0, 0.05, 0.25, 0.5, 1.0):
        anchor = "start" if part == -1 else "end" if part == 1 else "middle"
        parts.append(_text(LABEL + (1 + np.sign(part) * abs(part) ** 0.5) / 2 * width, y + 16, f"{part:g}", anchor))
    return "".join(parts)


def stack(
    layout: Sequence[Read],
    weights: Sequence[np.ndarray],
    colours: dict[str, str],
    out: frozenset[tuple[int, int]],
    title: str,
) -> str:
    """One token's reads through depth: a bar for each read, from the first to the output, cut by its sources.

    Bars are as long as one another: a segment is a source's share of the weights' absolute values.
    """
    tall = 13.5 if len(layout) <= 40 else 10.0
    wide = WIDTH - LABEL - 4
    parts, crosses = [], []
    for r, read in enumerate(layout):
        y, x = 4 + r * tall, LABEL
        parts.append(_text(LABEL - 5, y + tall / 2 + 3, row_name(read), "end"))
        total = float(np.abs(weights[r]).sum()) or 1.0
        for i, source in enumerate(read.sources):
            colour, weight = colours[source.name], float(weights[r][i])
            width = abs(weight) / total * wide
            box = (x, y, width - 0.4, tall - 2)
            gone = (r, i) in out
            parts.append(_edge(r, i, box, colour, f"{read.name} reads {source.name}: weight {weight:.3f}", gone))
            crosses += [_cross(box)] * gone
            if width > 6 + 5.2 * len(source.short):
                size = 'font-size="8.5" pointer-events="none"'
                parts.append(_text(x + width / 2, y + tall / 2 + 2, source.short, "middle", ink_on(colour), size))
            x += width
    return svg("stack", title, 8 + len(layout) * tall, parts + crosses)


def similarity(reads: Sequence[Read], cosines: np.ndarray, title: str) -> str:
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
                f'data-tip="{escape(f"{read.name} and {other.name}: cosine {value:+.2f}")}"/>'
            )
    y = 4 + len(reads) * cell
    parts.append(_text(LABEL, y + 12, "orange: opposite"))
    parts.append(_text(LABEL + (WIDTH - LABEL) / 2, y + 12, "white: unrelated", "middle"))
    parts.append(_text(WIDTH - 4, y + 12, "blue: alike", "end"))
    return svg("queries", title, y + 18, parts, role="img")
