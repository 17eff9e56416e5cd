"""One held-out text in the page, each token on the colour of how much it reads of the embedding."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from attnres.figures.patterns import boundaries, share, shares
from attnres.figures.plot import NotShown, number
from attnres.residuals import Source

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

READS = 4
"""Reads of a model that are shown."""
DEEPEST = 65
"""Percent of the colour at the largest weight: text stays readable on it."""
NAMED = 2
"""Sources that a token's title names."""


def example(inspection: "Inspection", source: str = "embedding") -> str:
    """The text once for each of the reads with which blocks begin and the output's, as HTML; empty where the model has
    no such read, or one whose weights are the same for every token."""
    try:
        routing = shares(inspection)
    except NotShown:
        return ""
    words = inspection.example
    if words is None:
        return ""
    rows = [row for row in boundaries(routing, most=READS + 1) if routing.weighs(row, source)]
    blocks = []
    for row in rows[-READS:]:
        read, column = routing.layout[row], routing.place(row, source)
        weights = np.stack([share(token) for token in words["weights"][inspection.layout.index(read)]])
        if len(weights) > 1 and np.ptp(weights, axis=0).max() < 1e-6:
            continue
        top = float(weights[:, column].max()) or 1.0
        tokens = [
            _token(text, kind, token, read.sources, float(token[column]) / top)
            for text, kind, token in zip(words["tokens"], words["kinds"], weights, strict=True)
        ]
        mean = float(weights[:, column].mean())
        lead = f"{read.name}: mean {number(mean)}, largest {number(top)}"
        blocks.append(f'<div><h3>{escape(lead)}</h3><pre class="tokens">{"".join(tokens)}</pre></div>')
    return f'<div class="figures texts">{"".join(blocks)}</div>' if blocks else ""


def _token(text: str, kind: str, weights: np.ndarray, sources: Sequence[Source], part: float) -> str:
    most = np.argsort(-weights)[:NAMED]
    title = f"{kind}: " + ", ".join(f"{sources[i].name} {number(float(weights[i]))}" for i in most)
    return f'<span style="--w:{DEEPEST * part:.0f}%" title="{escape(title, quote=True)}">{escape(text)}</span>'
