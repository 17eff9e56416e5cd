"""One held-out text in the page, each token on the colour of how much it reads of the embedding."""

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from attnres.figures.patterns import boundaries, share, shares
from attnres.figures.plot import NotShown, number

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
    found, names = inspection.example, inspection.routing
    if found is None or names is None:
        return ""
    rows = [row for row in boundaries(routing, most=READS + 1) if source in routing.sources[row]]
    blocks = []
    for row in [row for row in rows if len(routing.sources[row]) > 1][-READS:]:
        read = names["reads"].index(routing.reads[row])
        weights = np.stack([share(token) for token in found["weights"][read]])
        column = names["sources"][read].index(source)
        if len(weights) > 1 and np.ptp(weights, axis=0).max() < 1e-6:
            continue
        top = float(weights[:, column].max()) or 1.0
        tokens = [
            _token(text, kind, token, names["sources"][read], float(token[column]) / top)
            for text, kind, token in zip(found["tokens"], found["kinds"], weights, strict=True)
        ]
        mean = float(weights[:, column].mean())
        lead = f"{routing.reads[row]}: mean {number(mean)}, largest {number(top)}"
        blocks.append(f'<div><h3>{escape(lead)}</h3><pre class="tokens">{"".join(tokens)}</pre></div>')
    return f'<div class="figures texts">{"".join(blocks)}</div>' if blocks else ""


def _token(text: str, kind: str, weights: np.ndarray, sources: list[str], part: float) -> str:
    most = np.argsort(-weights)[:NAMED]
    title = f"{kind}: " + ", ".join(f"{sources[i]} {number(float(weights[i]))}" for i in most)
    return f'<span style="--w:{DEEPEST * part:.0f}%" title="{escape(title, quote=True)}">{escape(text)}</span>'
