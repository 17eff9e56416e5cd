"""SVG figures of the page, drawn by hand so that every cell can be pointed at and clicked; each stands on its own.

A cell says what it is in `aria-label`, shown when it is pointed at; an edge in `data-read` and `data-source` what a
click knocks out. All text is escaped, and has the colour of the page's (`currentColor`).
"""

import hashlib
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape

import numpy as np

from attnres.inspect.colours import LESS, MUTED, PAPER, ink_on, place_of_size, signed_colour
from attnres.residuals import Read, columns
from attnres.text import number, short, tick

BEFORE = "#8a94a3"
"""Of bars that an edit or a later step is compared with."""
RIGHT_TO_LEFT = ("R", "AL", "AN")
UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")
"""Kinds of characters in Unicode, as those above are directions."""


def visible(piece: str) -> str:
    """Return a token's text with what cannot be seen made visible: spaces at its ends, line ends, tabs, characters of
    control and form and other spaces by their codes. What is written from right to left is kept apart from the words
    around."""
    words = piece.strip(" ")
    front = len(piece) - len(piece.lstrip(" "))
    shown = "␣" * front + words + "␣" * (len(piece) - front - len(words))
    shown = shown.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(map(_seen, shown)) or "∅"
    return f"\u2068{shown}\u2069" if any(unicodedata.bidirectional(c) in RIGHT_TO_LEFT for c in shown) else shown


def _seen(letter: str) -> str:
    code = ord(letter)
    if code < 32:
        return chr(0x2400 + code)
    if code == 127:
        return "␡"
    return f"\\u{code:04x}" if letter != " " and unicodedata.category(letter) in UNSEEN else letter


def sentence(text: str, kind: str = "error") -> str:
    """Draw a sentence for the reader, or nothing."""
    return f'<p class="{escape(kind)}" role="status">{escape(text[:1].upper() + text[1:])}</p>' if text else ""


def section(of: str, name: str, title: str, body: str, note: str = "", save: bool = False) -> str:
    """Draw a part of the page, with a hash by which the browser knows it; `of` is the model's title."""
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
    whole = f"<h3>{escape(title)}{saving}</h3>{note}{body}"
    return f'<section class="{name}" data-hash="{hashlib.sha256(whole.encode()).hexdigest()[:16]}">{whole}</section>'


def without(html: str, known: Collection[str]) -> str:
    """Return the same with nothing in the sections of the hashes that are known."""
    parts = r'(<section class="\w+" data-hash="(\w+)">).*?(</section>)'
    return re.sub(parts, lambda part: part[1] + part[3] if part[2] in known else part[0], html, flags=re.DOTALL)


def bar(share: float, largest: float, colour: str) -> str:
    """Draw a bar whose length is `share` out of `largest`."""
    return f'<i style="width:{max(0.5, 100 * share / largest):.1f}%;background:{colour}"></i>'


def swatch(colour: str) -> str:
    """Draw a square of a colour, for a legend."""
    return f'<i class="swatch" style="background:{colour}"></i>'


WIDTH = 370.0
"""Of a figure, in units of its own, where its cells do not need more; a phone shows it at about one unit a pixel."""
LABEL = 46.0
"""For the names of rows."""
RIGHT = 14.0
"""For the last column's name, which is slanted."""
TOP = 30.0
"""For the names of columns."""
LEAST, WIDEST = 4.0, 60.0
"""Of a cell: narrower ones are hit by no pointer."""
HATCH = 5.0
"""Between two lines of a hatch."""
FAINT = 0.01
"""See `faint`."""
FONT = "font-family='system-ui,sans-serif'"

Edges = Collection[tuple[int, int]]
"""(read, source) pairs, each by its number."""


def key(layout: Sequence[Read]) -> str:
    """Return what the short names mean: "emb embedding, b block, part the block in progress"."""
    kinds = {source.short_kind: source.meaning for source in columns(read.sources for read in layout)}
    return ", ".join(f"{short} {meaning}" for short, meaning in kinds.items())


def row_name(read: Read) -> str:
    """Return the name of a read beside its row: attn 3, mlp 3, output; attn 3 q of one for the queries."""
    kind = "attn" if read.kind == "attention" else read.kind
    return read._replace(kind=kind, into=read.into and read.into[0]).name


def svg(name: str, title: str, height: float, parts: Iterable[str], width: float = WIDTH) -> str:
    """Draw a figure with a name for its file and a title for those who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" aria-label="{escape(title)}" data-figure="{name}" '
        f"{_size(width, height)}>{''.join(parts)}</svg>"
    )


def _size(width: float, height: float) -> str:
    """Attributes: how large a drawing is, how many times as wide as others, and its letters."""
    wider = f' style="--wide:{width / WIDTH:.4f}"' if width > WIDTH else ""
    return f'viewBox="0 0 {width:g} {height:g}"{wider} {FONT} font-size="9.5" fill="currentColor"'


def _scrolled(title: str, drawings: str) -> str:
    """Put what may be larger than its place in a box that keys can scroll."""
    return f'<div class="grid" tabindex="0" role="region" aria-label="{escape(title)}">{drawings}</div>'


def _text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def _spacing(cell: float) -> int:
    """Return the step at which names of rows or columns fit."""
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
    """Draw a number for each edge: a row for each read, a column for each source, hatched where there is no such
    edge.

    There is a cross on what is knocked out, and a stroke on what is at single tokens. The names of the columns come a
    second time, to stay in view.

    Args:
        words: what to say of a read's source, each by its number.
        largest: where the scale ends, on either side.
        click: whether a click on a cell knocks its edge out.
    """
    across = columns(read.sources for read in layout)
    place = {source.name: i for i, source in enumerate(across)}
    wide = min(WIDEST, max(LEAST, (WIDTH - LABEL - RIGHT) / len(across)))
    width = max(WIDTH, LABEL + len(across) * wide + RIGHT)
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
                parts.append(_edge(r, i, box, colour, words(r, i), cut=cut))
            else:
                parts.append(_cell(box, colour, words(r, i), first=r == i == 0))
            marks += [_cross(box, both=cut)] * (cut or (r, i) in once)
        parts.append(_hatch({place[source.name] for source in read.sources}, len(across), (LABEL, y, wide, tall)))
    bottom = TOP + len(layout) * tall + 8
    parts.append(_scale(bottom, largest))
    strip = f'<svg class="names" aria-hidden="true" {_size(width, TOP)}>{"".join(names)}</svg>'
    return _scrolled(title, strip + svg(name, title, bottom + 22, names + parts + marks, width))


Box = tuple[float, float, float, float]
"""x, y, width, height."""


def _place(box: Box) -> str:
    x, y, width, height = box
    return f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}"'


def _cell(box: Box, colour: str, words: str, *, first: bool, kind: str = "", does: str = 'role="img"') -> str:
    """Draw a cell and its name; the figure's first is where the tabulator key stops, arrow keys lead to the
    others."""
    return (
        f'<rect class="cell{kind}" {_place(box)} fill="{colour}" {does} tabindex="{0 if first else -1}" '
        f'aria-label="{escape(words)}"/>'
    )


def _edge(read: int, source: int, box: Box, colour: str, words: str, *, cut: bool) -> str:
    """Draw a cell to click."""
    pressed = f'data-read="{read}" data-source="{source}" role="button" aria-pressed="{"true" if cut else "false"}"'
    kind, words = (" edge gone", f"{words} (knocked out)") if cut else (" edge", words)
    return _cell(box, colour, words, first=read == source == 0, kind=kind, does=pressed)


def _hatch(there: Collection[int], count: int, first: Box) -> str:
    """Draw lines over those of a row's `count` cells that are not `there`; `first` is the box of the first cell."""
    x, top, wide, tall = first
    lines = []
    absent = [i for i in range(count) if i not in there]
    for _, run in itertools.groupby(enumerate(absent), lambda one: one[1] - one[0]):
        cells = [cell for _, cell in run]
        left, right, bottom = x + cells[0] * wide, x + (cells[-1] + 1) * wide, top + tall
        for k in range(math.ceil((left + top) / HATCH), math.ceil((right + bottom) / HATCH)):
            low, high = max(left, k * HATCH - bottom), min(right, k * HATCH - top)  # x + y is the same along a line
            lines.append(f"M{low:.1f} {k * HATCH - low:.1f}L{high:.1f} {k * HATCH - high:.1f}")
    look = 'pointer-events="none" stroke="currentColor" stroke-opacity="0.3" stroke-width="0.7"'
    return f'<path class="absent" {look} d="{"".join(lines)}"/>' if lines else ""


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
    """Over the root of the size, with the sign; grey of what is no number."""
    return MUTED if math.isnan(value) else signed_colour(place_of_size(value, largest))


def _scale(y: float, largest: float) -> str:
    """Draw the scale from -largest to largest: colours over the square root, with the numbers themselves below."""
    steps, width = 40, WIDTH - LABEL - RIGHT
    places = [(i + 0.5) / steps * 2 - 1 for i in range(steps)]
    parts = [
        f'<rect x="{LABEL + i * width / steps:.2f}" y="{y:.1f}" width="{width / steps + 0.3:.2f}" height="6" '
        f'fill="{signed_colour(place)}"/>'
        for i, place in enumerate(places)
    ]
    for part in (-1.0, -0.25, 0.0, 0.05, 0.25, 1.0):
        anchor = "start" if part == -1 else "end" if part == 1 else "middle"
        x = LABEL + (1 + place_of_size(part, 1.0)) / 2 * width
        parts.append(_text(x, y + 16, tick(part * largest), anchor))
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
    """Draw one token's reads through depth: a bar for each read, from the first to the output, cut by its sources.

    A segment is as long as its source's part of the read; those that point against it lie left of the line. One that a
    pointer would not hit says what it is, and is clicked in the figure of all edges.

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
            colour, part = colours[source.name], float(np.nan_to_num(parts_of[r][i]))
            width = abs(part) * wide
            x = right if part >= 0 else left - width
            right, left = (right + width, left) if part >= 0 else (right, x)
            box = (x, y, width - min(0.4, 0.15 * width), tall - 2)
            cut = (r, i) in out
            if width < LEAST:
                parts.append(_cell(box, colour, words(r, i), first=r == i == 0))
            else:
                parts.append(_edge(r, i, box, colour, words(r, i), cut=cut))
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
        parts.append(_text(zero + end * wide, bottom + 9, tick(end), "end" if end == 1 else "start"))
    return svg("stack", title, bottom + 13, parts + marks)


def similarity(reads: Sequence[Read], cosines: np.ndarray, title: str) -> str:
    """Draw cosines between the pseudo-queries of all reads."""
    cell = min(18.0, max(LEAST, (WIDTH - LABEL - 4) / len(reads)))
    parts = []
    every = _spacing(cell)
    for r, read in enumerate(reads):
        y = 4 + r * cell
        if r % every == 0 or (r == len(reads) - 1 and (len(reads) - 1) % every >= every / 2):
            parts.append(_text(LABEL - 5, y + cell / 2 + 3.3, row_name(read), "end"))
        for c, other in enumerate(reads):
            value = float(cosines[r, c])
            colour = MUTED if math.isnan(value) else signed_colour(value)
            words = f"{read.name} and {other.name}: cosine {short(value, signed=True)}"
            box = (LABEL + c * cell, y, cell - 0.3, cell - 0.3)
            parts.append(_cell(box, colour, words, first=r == c == 0))
    y = 4 + len(reads) * cell
    parts.append(_text(LABEL, y + 12, "orange: opposite"))
    parts.append(_text(LABEL + (WIDTH - LABEL) / 2, y + 12, "white: unrelated", "middle"))
    parts.append(_text(WIDTH - 4, y + 12, "blue: alike", "end"))
    figure = svg("queries", title, y + 18, parts, max(WIDTH, LABEL + len(reads) * cell + 4))
    return _scrolled(title, figure)


def faint(count: int) -> float:
    """Return attention below which one of `count` tokens is not drawn: half of what each has where all have the same,
    and `FAINT` at most."""
    return min(FAINT, 0.5 / count)


def attention(layers: Sequence[int], rows: dict[str, np.ndarray], names: Sequence[str], title: str) -> str:
    """Draw what one token attends to: for each of the `rows` (layers, tokens) a line a layer and a column a token,
    zero to one on the scale's blue half; what is `faint` is left out."""
    wide = (WIDTH - LABEL - 4) / len(names)
    tall, y = 11.0, 0.0
    parts, first = [], True
    for head, values in rows.items():
        parts.append(_text(LABEL, y + 10, head))
        y += 14
        for i, layer in enumerate(layers):
            parts.append(_text(LABEL - 5, y + tall / 2 + 3, f"attn {layer}", "end"))
            parts.append(f'<rect {_place((LABEL, y, WIDTH - LABEL - 4, tall - 0.6))} fill="{signed_colour(0.0)}"/>')
            for t in np.flatnonzero(values[i] >= faint(len(names))).tolist():
                value = float(values[i][t])
                words = f"layer {layer} attends to token {t} “{names[t]}”: {head} {number(value)}"
                box = (LABEL + t * wide, y, wide - (0.4 if wide > 3 else 0), tall - 0.6)
                parts.append(_cell(box, _colour(value, 1.0), words, first=first))
                first = False
            y += tall
        y += 4
    parts.append(_text(LABEL, y + 8, "the text from its beginning"))
    parts.append(_text(WIDTH - 4, y + 8, "the chosen token", "end"))
    return svg("attention", title, y + 12, parts)
