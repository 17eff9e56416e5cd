"""One language of colour for everything that is looked at: a hue a kind of source, and a scale that says more from
less.

Hues are Okabe & Ito's (2008), apart for every kind of colour vision. Within a kind sources run through neighbouring
hues as well as from dark to light, so that two of one kind differ by more than shade. On a scale with a sign blue is
more, alike or better, orange less, opposite or worse.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnres.residuals import Source

INK, MUTED, GRID, PAPER = "#1b1f24", "#5f6b7a", "#e2e6eb", "#fdfdfc"
MORE, LESS = "#0072b2", "#d55e00"
DIVERGING = ("#5e2400", LESS, "#f2b27c", "#f6f5f2", "#9fd0f0", MORE, "#06304d")
"""From -1 to 1, evenly apart."""

_FIXED = {"embedding": "#e69f00", "partial": "#4a4a4a", "stream": "#8a94a3", "null": "#c3cad4", "middle": "#b07d62"}
_RAMPS = {
    "attention": ("#12356b", "#0072b2", "#56b4e9", "#bfe6f7"),
    "mlp": ("#00402f", "#009e73", "#7ac36a", "#d5e8a0"),
    "block": ("#5b1a66", "#a83279", "#cc79a7", "#f6c6c0"),
    "state": ("#4f3a1e", "#8c6d31", "#bd9e39", "#e7cb94"),
}
_RAMPS["layer"] = _RAMPS["block"]  # sums of neighbouring outputs, both
_OTHER = (MUTED, GRID)


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def blend(a: str, b: str, share: float) -> str:
    """Return the colour `share` of the way from `a` to `b`."""
    share = min(1.0, max(0.0, share))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(rgb(a), rgb(b), strict=True))


def along(stops: Sequence[str], place: float) -> str:
    """Return the colour at `place`, 0 to 1, of a ramp through evenly spaced stops."""
    place = min(1.0, max(0.0, place)) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    return blend(stops[index], stops[index + 1], place - index)


def signed_root(value: Any) -> Any:
    """Return the root of the size of a number, or of each of an array, with its sign."""
    return np.sign(value) * np.sqrt(np.abs(value))


def place_of_size(value: float, largest: float) -> float:
    """Return sign(x) sqrt(|x| / largest), clipped to -1 and 1: the place of a number on a colour scale; 0 for NaN."""
    place = math.copysign(math.sqrt(abs(value / largest)), value)
    return 0.0 if math.isnan(place) else min(1.0, max(-1.0, place))


def signed_colour(value: float) -> str:
    """Of a number from -1 (orange) over 0 (nearly white) to 1 (blue)."""
    return along(DIVERGING, (value + 1) / 2)


def source_colours(sources: Sequence[Source]) -> list[str]:
    """Return a colour for each of a model's sources: of a kind's, from dark to light by number."""
    colours = []
    for source in sources:
        if source.number is None:
            colours.append(_FIXED.get(source.kind, MUTED))
            continue
        numbers = [other.number for other in sources if other.kind == source.kind and other.number is not None]
        first, last = min(numbers), max(numbers)
        colours.append(along(_RAMPS.get(source.kind, _OTHER), (source.number - first) / max(1, last - first)))
    return colours


def contrast(a: str, b: str) -> float:
    """From 1 to 21, of text in one colour on the other: (L + 0.05) / (l + 0.05), L the lighter one's relative
    luminance (WCAG 2.2); 4.5 is enough for small text."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [x / 255 for x in rgb(colour)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Black or white text, whichever reads better on it: of any colour the contrast is above 4.5."""
    return max("#000000", "#ffffff", key=lambda ink: contrast(ink, colour))
