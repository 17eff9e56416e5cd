"""The sum of gates that no loss depends on, and their logits, over training."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from attnres.figures import style
from attnres.figures.plot import PAGE, SMALL, Plot, canvas, head

PANELS = {
    "what closes them": ("as published", "without the penalty", "without annealing", "ten times the rate"),
    "other starts and schedules": ("as published", "biased open", "at least two", "cosine", "exponential"),
    "noise for the loss's gradient": ("as published", "noise of 0.001", "noise of 0.01"),
}
"""Title -> the variants of `null_gates.VARIANTS` in it."""
COLOURS = ("#4a5260", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of a panel's lines, in order (Okabe & Ito)."""


def courses(results: Mapping[str, Any]) -> Plot:
    """Draw the sum of the gates above and the mean logit below, a column a question.

    Args:
        results: what `null_gates.findings` returns.
    """
    variants = {one["label"]: one for one in results["variants"]}
    steps, (begin, end) = results["steps"], results["annealing"]
    share = results["target"] / results["gates"]
    figure, axes = canvas(PAGE, 3.9, 2, len(PANELS), sharex=True, sharey="row")
    for column, (title, labels) in zip(axes.T, PANELS.items(), strict=True):
        for ax, key in zip(column, ("count", "logit"), strict=True):
            ax.axvspan(begin, end, color=style.GRID, linewidth=0, zorder=0)
            for label, colour in zip(labels, COLOURS, strict=False):
                for seed, run in enumerate(variants[label]["courses"]):
                    ax.plot(steps, run[key], color=colour, linewidth=1.1, label="" if seed else label)
        dotted = {"color": style.MUTED, "linewidth": 0.9, "linestyle": ":"}
        column[0].axhline(results["target"], **dotted)
        temperatures = np.array(variants["as published"]["courses"][0]["temperature"])
        column[1].plot(steps, math.log(share / (1 - share)) * temperatures, **dotted)
        head(column[0], title)
        column[1].set_xlabel("step")
        column[1].xaxis.set_major_locator(MaxNLocator(4, integer=True))
        column[1].legend(fontsize=SMALL - 0.5, handlelength=1.2, labelspacing=0.25, borderpad=0.2)
    axes[0, 0].set_ylabel("sum of the gates")
    axes[1, 0].set_ylabel("mean logit")
    caption = (
        f"Above: the sum of the {results['gates']} gates; dotted: the target of the penalty. Below: their mean logit; "
        "dotted: the logit at which they add up to the target at the published temperature. Shaded: annealing. Noise: "
        "one line a seed."
    )
    return Plot("null-gates", "gates that no loss depends on", caption, figure)
