"""Colours of sources and weights: a hue for each kind, lightness for depth, the report's scale.

Hues are Okabe & Ito's (2008), apart for every kind of colour vision; weights are on viridis with a square-root scale,
as in the report's heatmaps.
"""

from collections.abc import Sequence

from attnres.residuals import Read, columns

INK, MUTED, GRID, PAPER = "#1b1f24", "#5f6b7a", "#e2e6eb", "#fdfdfc"
OUT = "#d55e00"
"""What is knocked out, and losses that rise."""
BETTER = "#0072b2"
"""Losses that fall."""

_FIXED = {"embedding": "#e69f00", "partial": "#cc79a7", "stream": "#8a94a3", "null": "#c3cad4"}
_RAMPS = {
    "attention": ("#a8d4f0", "#0b4f7d"),
    "mlp": ("#a5e0cb", "#00583f"),
    "block": ("#a8d4f0", "#0b4f7d"),
    "state": ("#d9dee5", "#4a5260"),
}
_VIRIDIS = (
    "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26",
    "#fde725",
)  # fmt: skip


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def blend(a: str, b: str, share: float) -> str:
    """The colour `share` of the way from `a` to `b`."""
    share = min(1.0, max(0.0, share))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(rgb(a), rgb(b), strict=True))


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


def source_colours(layout: Sequence[Read]) -> dict[str, str]:
    """A colour for every source of a model's reads, by name."""
    sources = columns(read.sources for read in layout)
    colours = {}
    for source in sources:
        numbers = [other.number for other in sources if other.kind == source.kind and other.number is not None]
        if source.number is None:
            colours[source.name] = _FIXED.get(source.kind, MUTED)
            continue
        start, end = _RAMPS.get(source.kind, (GRID, MUTED))
        share = (source.number - min(numbers)) / max(1, max(numbers) - min(numbers))
        colours[source.name] = blend(start, end, share)
    return colours


def weight_colour(weight: float, largest: float = 1.0) -> str:
    """Of a weight between zero and `largest`: viridis over the square root."""
    place = min(1.0, max(0.0, abs(weight) / largest)) ** 0.5 * (len(_VIRIDIS) - 1)
    index = min(int(place), len(_VIRIDIS) - 2)
    return blend(_VIRIDIS[index], _VIRIDIS[index + 1], place - index)


def signed_colour(value: float) -> str:
    """Of a number from -1 (orange) over 0 (paper) to 1 (blue)."""
    return blend(PAPER, BETTER if value > 0 else OUT, abs(value))
