"""Where a statement or a sentence begins: how much more of the embedding is read there, read by read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnres.figures import style
from attnres.figures.plot import NotShown, Plot, canvas, depth_axis, head, legend

SPIKES = {
    "other tokens": ("over all other tokens", "#0072b2", "o"),
    "alike": ("over tokens alike", "#e69f00", "s"),
    "same token": ("over the same token elsewhere", "#009e73", "^"),
}
"""What a start is held against: words, colour (Okabe & Ito), mark."""


def starts(studies: Sequence[Mapping[str, Any]]) -> Plot:
    """The spike of the embedding's weight at starts, by read: a row a study, a column a variant.

    Args:
        studies: what `spikes.findings` returns, one for each text.
    """
    columns = max((len(study["variants"]) for study in studies), default=0)
    if not columns:
        raise NotShown("no variant weighs the embedding")
    figure, axes = canvas(style.sheet().page, 1.9 * len(studies) + 0.4, len(studies), columns, sharey="row")
    for study, row in zip(studies, axes, strict=True):
        for ax in row[len(study["variants"]) :]:
            ax.remove()
        for ax, variant in zip(row, study["variants"], strict=False):
            _panel(ax, variant)
            head(ax, f"{study['language']}: {variant['label']}")
        row[0].set_ylabel(f"weight of the embedding,\n{study['start']} less others")
    legend(figure, axes[0, 0])
    caption = (
        "How much more weight the embedding has where a statement or a sentence begins; shaded: reads between blocks. "
        "Bars: standard errors over documents and over seeds, added in squares. "
    )
    alike = {study["language"]: " and ".join(study["alike"]) for study in studies}
    caption += "Tokens alike: " + "; ".join(f"{language}: {names}" for language, names in alike.items()) + "."
    return Plot("starts", "the embedding where a statement or a sentence begins", caption, figure)


def _panel(ax: Any, variant: Mapping[str, Any]) -> None:
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    for index in variant["boundaries"]:
        ax.axvspan(index - 0.5, index + 0.5, color=style.GRID, linewidth=0, zorder=0)
    for shift, (name, (words, colour, mark)) in zip((-0.2, 0.0, 0.2), SPIKES.items(), strict=True):
        spike = variant["spikes"][name]
        mean = _numbers(spike["mean"])
        error = np.hypot(_numbers(spike["se_documents"], 0.0), _numbers(spike["se_seeds"], 0.0))
        depth = np.arange(len(mean)) + shift
        ax.errorbar(
            depth, mean, error, fmt=mark, color=colour, markersize=2.4, elinewidth=0.8, linewidth=0, label=words
        )
    depth_axis(ax, len(variant["reads"]), reads=True)
    ax.set_xlim(-1, len(variant["reads"]))


def _numbers(values: Sequence[float | None], unknown: float = math.nan) -> np.ndarray:
    return np.array([unknown if value is None else value for value in values], dtype=float)
