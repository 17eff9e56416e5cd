"""SVG figures of the page, drawn by hand so that every cell can be pointed at and clicked; each stands on its own.

An edge says what it is in `aria-label` (shown when it is pointed at), and in `data-read` and `data-source` what a click
knocks out. Other cells have a `data-tip`. All text is escaped, and has the colour of the page's (`currentColor`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape

import numpy as np

from attnres.inspect.colours import GRID, LESS, PAPER, ink_on, place_of_size, signed_colour
from attnres.residuals import Read, columns

WIDTH = 370.0
"""Of every figure, in units of its own; a phone shows it at about one unit a pixel."""
LABEL = 46.0
"""For the names of rows."""
RIGHT = 14.0
"""For the last column's name, which is slanted."""
TOP = 30.0
"""For the names of columns."""
WIDEST = 60.0
"""Of a cell."""
FAINT = 0.01
"""Attention below which a token is not drawn."""
FONT = "font-family='system-ui,sans-serif'"

Edges = Collection[tuple[int, int]]
"""(read, source) pairs, each by its number."""


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
        f'viewBox="0 0 {WIDTH:g} {height:g}" {FONT} font-size="9.5" fill="currentColor">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def _spacing(cell: float) -> int:
    """Every how many rows or columns a name fits."""
    return math.ceil(10.5 / cell)


def heatmap(
    layout: Sequence[Read],
    values: Sequence[np.ndarray],
    title: str,
    words: Callable[[int, int], str],
    *,
    name: str = "contributions",
    largest: float,
    out: Edges = (),
    once: Edges = (),
    click: bool = True,
) -> str:
    """A number for each edge: a row for each read, a column for each source, with a cross on what is knocked out and a
    stroke on what is at single tokens. The names of the columns come a second time, to stay in view.

    Args:
        words: what to say of a read's source, each by its number.
        largest: where the scale ends, on either side.
        click: whether a click on a cell knocks its edge out.
    """
    across = columns(read.sources for read in layout)
    place = {source.name: i for i, source in enumerate(across)}
    wide = min(WIDEST, (WIDTH - LABEL - RIGHT) / len(across))
    tall = min(14.0, max(9.0, wide))
    names, parts, marks = [], [], []
    every = _spacing(wide)
    for i, source in enumerate(across):
        if i % every == 0 or (i == len(across) - 1 and (len(across) - 1) % every >= every / 2):
            x = LABEL + (i + 0.5) * wide + 3
            names.append(_text(x, TOP - 4, source.short, extra=f'transform="rotate(-60 {x:.1f} {TOP - 4:.1f})"'))
    every = _spacing(tall)
    for r, read in enumerate(layout):
        y = TOP + r * tall
        if r % every == 0 or r == len(layout) - 1:
            parts.append(_text(LABEL - 5, y + tall / 2 + 3.3, row_name(read), "end"))
        for i, source in enumerate(read.sources):
            box = (LABEL + place[source.name] * wide, y, wide - 0.6, tall - 0.6)
            cut = (r, i) in out
            colour = _colour(float(values[r][i]), largest)
            if click:
                parts.append(_edge(r, i, box, colour, words(r, i), cut))
            else:
                parts.append(f'<rect {_place(box)} fill="{colour}" data-tip="{escape(words(r, i))}"/>')
            marks += [_cross(box, both=cut)] * (cut or (r, i) in once)
    bottom = TOP + len(layout) * tall + 8
    parts.append(_scale(bottom, largest))
    figure = svg(name, title, bottom + 22, names + parts + marks)
    strip = (
        f'<svg class="names" aria-hidden="true" viewBox="0 0 {WIDTH:g} {TOP:g}" {FONT} font-size="9.5" '
        f'fill="currentColor">{"".join(names)}</svg>'
    )
    return f'<div class="grid" tabindex="-1">{strip}{figure}</div>'


Box = tuple[float, float, float, float]
"""x, y, width, height."""


def _place(box: Box) -> str:
    x, y, width, height = box
    return f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}"'


def _edge(read: int, source: int, box: Box, colour: str, words: str, cut: bool) -> str:
    """A cell to click; the figure's first is where the tabulator key stops, arrow keys lead to the others."""
    words = escape(words + (" (knocked out)" if cut else ""))
    return (
        f'<rect class="edge{" gone" if cut else ""}" {_place(box)} fill="{colour}" data-read="{read}" '
        f'data-source="{source}" role="button" aria-pressed="{"true" if cut else "false"}" '
        f'tabindex="{0 if read == source == 0 else -1}" aria-label="{words}"/>'
    )


def _cross(box: Box, both: bool = True) -> str:
    """On what is knocked out; one of its lines on what is at single tokens."""
    x, y, width, height = box
    down = f"m0 {-height:.2f}l{-width:.2f} {height:.2f}" if both else ""
    lines = f'd="M{x:.2f} {y:.2f}l{width:.2f} {height:.2f}{down}"'
    return (
        f'<g pointer-events="none" fill="none"><rect {_place(box)} stroke="{LESS}" stroke-width="1.4"/>'
        f'<path {lines} stroke="{PAPER}" stroke-width="2.6"/><path {lines} stroke="{LESS}" stroke-width="1.4"/></g>'
    )


def _colour(value: float, largest: float) -> str:
    """Over the root of the size, with the sign."""
    return signed_colour(place_of_size(value, largest))


def _scale(y: float, largest: float) -> str:
    """The scale from -largest to largest: colours over the square root, with the numbers themselves below."""
    steps, width = 40, WIDTH - LABEL - RIGHT
    places = [(i + 0.5) / steps * 2 - 1 for i in range(steps)]
    parts = [
        f'<rect x="{LABEL + i * width / steps:.2f}" y="{y:.1f}" width="{width / steps + 0.3:.2f}" height="6" '
        f'fill="{signed_colour(place)}"/>'
        for i, place in enumerate(places)
    ]
    for part in (-1.0, -0.25, 0.0, 0.05, 0.25, 0.5, 1.0):
        anchor = "start" if part == -1 else "end" if part == 1 else "middle"
        x = LABEL + (1 + place_of_size(part, 1.0)) / 2 * width
        parts.append(_text(x, y + 16, f"{part * largest:.2g}", anchor))
    return "".join(parts)


def stack(
    layout: Sequence[Read],
    parts_of: Sequence[np.ndarray],
    colours: dict[str, str],
    title: str,
    words: Callable[[int, int], str],
    *,
    span: tuple[float, float] = (0.0, 1.0),
    out: Edges = (),
) -> str:
    """One token's reads through depth: a bar for each read, from the first to the output, cut by its sources.

    A segment is as long as its source's part of the read; those that point against it lie left of the line.

    Args:
        parts_of: of each read (sources,).
        span: the ends of the scale, the first of them zero or below.
    """
    tall = 13.5 if len(layout) <= 40 else 10.0
    wide = (WIDTH - LABEL - 4) / (span[1] - span[0])
    zero = LABEL - span[0] * wide
    parts, marks = [], []
    for r, read in enumerate(layout):
        y, right, left = 4 + r * tall, zero, zero
        parts.append(_text(LABEL - 5, y + tall / 2 + 3, row_name(read), "end"))
        for i, source in enumerate(read.sources):
            colour, part = colours[source.name], float(parts_of[r][i])
            width = abs(part) * wide
            x = right if part >= 0 else left - width
            right, left = (right + width, left) if part >= 0 else (right, x)
            box = (x, y, width - 0.4, tall - 2)
            cut = (r, i) in out
            parts.append(_edge(r, i, box, colour, words(r, i), cut))
            if cut:
                marks.append(_cross(box))
            elif width > 6 + 5.2 * len(source.short):
                size = f'fill="{ink_on(colour)}" font-size="8.5" pointer-events="none"'
                parts.append(_text(x + width / 2, y + tall / 2 + 2, source.short, "middle", size))
    bottom = 4 + len(layout) * tall
    if span[0] < 0:
        line = f'stroke="currentColor" stroke-width="0.8" pointer-events="none" d="M{zero:.2f} 2V{bottom:.1f}"'
        parts.append(f"<path {line}/>")
    for end in (0.0, 0.5, 1.0):
        parts.append(_text(zero + end * wide, bottom + 9, f"{end:g}", "end" if end == 1 else "start"))
    return svg("stack", title, bottom + 13, parts + marks)


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


def attention(layers: Sequence[int], rows: dict[str, np.ndarray], names: Sequence[str], title: str) -> str:
    """What one token attends to: for each of the `rows` (layers, tokens) a line a layer and a column a token, zero to
    one on the scale's blue half."""
    wide = (WIDTH - LABEL - 4) / len(names)
    tall, y = 11.0, 0.0
    parts = []
    for head, values in rows.items():
        parts.append(_text(LABEL, y + 10, head))
        y += 14
        for i, layer in enumerate(layers):
            parts.append(_text(LABEL - 5, y + tall / 2 + 3, f"attn {layer}", "end"))
            parts.append(f'<rect {_place((LABEL, y, WIDTH - LABEL - 4, tall - 0.6))} fill="{signed_colour(0.0)}"/>')
            for t in np.flatnonzero(values[i] >= FAINT).tolist():
                value = values[i][t]
                tip = escape(f"layer {layer} attends to token {t} “{names[t]}”: {head} {float(value):.3f}")
                parts.append(
                    f"<rect {_place((LABEL + t * wide, y, wide - (0.4 if wide > 3 else 0), tall - 0.6))} "
                    f'fill="{signed_colour(place_of_size(float(value), 1.0))}" data-tip="{tip}"/>'
                )
            y += tall
        y += 4
    parts.append(_text(LABEL, y + 8, "the text from its beginning"))
    parts.append(_text(WIDTH - 4, y + 8, "the chosen token", "end"))
    return svg("attention", title, y + 12, parts, role="img")
