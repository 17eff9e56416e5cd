"""Models or runs side by side under their labels, with the numbers of each seed; and figures of their losses."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from attnres.figures import style
from attnres.figures.plot import (
    DIFFERENCE,
    LOSS,
    RATE,
    TRAIN_LOSS,
    NotShown,
    Plot,
    beside,
    canvas,
    legend,
    limits,
    numbers_on,
    panels,
    plain,
)
from attnres.figures.style import sheet
from attnres.inspect.colours import LESS, MORE
from attnres.inspect.inspection import mean_inspection
from attnres.residuals import RESIDUALS, Traits
from attnres.residuals.registry import settings_of
from attnres.stats import Effect
from attnres.text import tick

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

Points = Sequence[tuple[float, float]]
"""(place on the axis of training, value) pairs."""
WORDS = {
    "lr": "learning rate",
    "residual_lr": "query rate",
    "residual_decay": "query decay",
    "train_only": "trained:",
    "lora_rank": "LoRA rank",
    "lora_alpha": "LoRA alpha",
    "distill_weight": "distillation",
    "distill_temperature": "temperature",
}
"""Names in a legend of the training settings that a variant's label holds."""
START = 1 / 8
"""Fraction of a run, from its start, whose losses may lie outside the axes: they fall too steeply for a common
scale."""


class LossDifference(NamedTuple):
    """The difference of a held-out loss to the baseline's, in nats per token.

    Attributes:
        place: position on the axis of training.
        effect: the mean over seeds with its interval.
        basis: what the interval is over, "seeds" or "windows". per_seed: the difference of each seed.
    """

    place: float
    effect: Effect
    basis: str = "windows"
    per_seed: Sequence[float] = ()


@dataclass(frozen=True)
class Variant:
    """Everything measured under one label; fields without a measurement are empty.

    Attributes:
        seeds: the seeds that means are taken over.
        inspections, dynamics: by seed; `dynamics` as `attnres.inspect.inspection.dynamics` returns it.
        held_out, train: losses by seed, with seeds that are not in `seeds`.
        differences: differences to the baseline, over training.
        group, rate, finals: the label without its learning rate, that rate, and the final held-out losses.
        complete: whether every seed has finished.
    """

    label: str
    residual: str
    traits: Traits
    seeds: Sequence[int] = (0,)
    inspections: Mapping[int, "Inspection"] = field(default_factory=dict)
    dynamics: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    held_out: Mapping[int, Points] = field(default_factory=dict)
    train: Mapping[int, Points] = field(default_factory=dict)
    differences: Sequence[LossDifference] = ()
    group: str = ""
    rate: float | None = None
    finals: Sequence[float] = ()
    complete: bool = True

    @cached_property
    def mean(self) -> "Inspection":
        """Return the inspection of the first seed, with the quantities that have a mean over seeds replaced by it."""
        return mean_inspection(list(self.inspections.values()), self.label)

    def over_steps(self, key: str) -> tuple[Sequence[float], np.ndarray]:
        """Return steps and (depth, steps) values recorded in training, means over seeds; the first seed's if seeds have
        different steps."""
        runs = [run for run in self.dynamics.values() if run.get(key) and all(run[key])]
        if not runs:
            return [], np.empty((0, 0))
        same_steps = [run for run in runs if run["steps"] == runs[0]["steps"]]
        return runs[0]["steps"], np.mean([np.array(run[key], dtype=float).T for run in same_steps], axis=0)


@dataclass(frozen=True)
class Comparison:
    """Variants in order, and the baseline they are compared with.

    Attributes:
        baseline: the label whose line is zero where differences are drawn.
        unit: of the axis of training.
        equal: whether all were trained under equal conditions.
    """

    variants: Sequence[Variant]
    baseline: str | None = None
    unit: str = "step"
    equal: bool = False

    @classmethod
    def of_models(cls, inspections: Sequence["Inspection"]) -> Self:
        """Return the comparison of several models under their own names."""
        return cls(
            [
                Variant(
                    str(inspection.model["name"]),
                    inspection.model["residual"],
                    inspection.traits,
                    inspections={0: inspection},
                    dynamics={0: inspection.dynamics} if inspection.dynamics else {},
                )
                for inspection in inspections
            ]
        )

    def having(self, name: str) -> Self:
        """Return the comparison with only the variants whose field `name` is not empty."""
        return dataclasses.replace(self, variants=[one for one in self.variants if getattr(one, name)])

    def once(self) -> Self:
        """Return the comparison without variants that are mathematically the baseline, if the baseline is among the
        variants."""
        if all(one.traits.is_chance or one.label != self.baseline for one in self.variants):
            return self
        return dataclasses.replace(self, variants=[one for one in self.variants if not one.traits.is_chance])

    def without(self, name: str) -> Self:
        """Return the comparison with the field `name` of every variant emptied."""
        return dataclasses.replace(self, variants=[dataclasses.replace(one, **{name: {}}) for one in self.variants])

    def noise(self) -> list[tuple[float, float]]:
        """Return (place, standard deviation of the difference between two runs of the baseline), from two seeds or
        more: the noise between single runs, which an error over windows does not contain."""
        runs = next((one.held_out for one in self.variants if one.label == self.baseline), {})
        curves = [dict(points) for points in runs.values()]
        if len(curves) < 2:
            return []
        common = sorted(set.intersection(*(set(curve) for curve in curves)))
        deviations = [np.std([curve[place] for curve in curves], ddof=1) for place in common]
        return [(place, float(2**0.5 * one)) for place, one in zip(common, deviations, strict=True)]

    def looks(self) -> list[dict[str, Any]]:
        """Return the line keywords of each variant: the colour of its residual, and its label."""
        looks = style.looks({one.label: (one.residual, one.traits) for one in self.variants})
        return [{**looks[one.label], "label": plain(in_words(one.label, one.residual))} for one in self.variants]

    def named(self, name: str, title: str) -> tuple[str, str]:
        """Return a figure's name and title for the one model, or for all."""
        if len(self.variants) == 1:
            return name, f"{self.variants[0].label}: {title}"
        return f"compare-{name}", title[0].upper() + title[1:]


def in_words(label: str, residual: str) -> str:
    """Return a variant's label as a legend shows it; a name that is no variant's label is unchanged.

    >>> in_words("block-num_blocks4-residual_lr0.000133", "block"), in_words("my-model", "block")
    ('block, num blocks 4, query rate 0.000133', 'my-model')
    """
    name, *parts = re.split("-(?=[a-z])", label)
    words = dict(WORDS)
    if residual in RESIDUALS:
        words = {setting: setting.replace("_", " ") for setting in settings_of(residual)} | words
    for part in parts:
        setting = max((one for one in words if part.startswith(one) and part != one), key=len, default=None)
        if setting is None:
            return label
        name += f", {words[setting]} {part.removeprefix(setting)}"
    return name


# ------------------------------------------------------------------ differences with their intervals


class Interval(NamedTuple):
    """One row of `Differences`.

    Attributes:
        difference, margin: the difference, and half the width of its interval (NaN if unknown).
        clear: whether the interval excludes 0. colour: the row's colour; None colours it by sign if it is clear.
        is_chance: whether the variant is mathematically the baseline. per_seed: the differences of single seeds.
    """

    label: str
    difference: float
    margin: float
    clear: bool
    colour: str = ""
    is_chance: bool = False
    per_seed: Sequence[float] = ()


@dataclass(frozen=True)
class Differences:
    """Differences to a baseline with their intervals, one a row, the best at the top or in the given order. An interval
    far wider than all differences is cut at the edge."""

    name: str
    title: str
    caption: str
    x_label: str
    rows: list[Interval]
    zero: str = style.MUTED
    """The colour of the line at 0."""
    ranked: bool = True

    def draw(self) -> Plot:
        """Draw the chart inside `style.style`; the caption explains its marks."""
        rows = sorted(self.rows, key=lambda row: -row.difference) if self.ranked else self.rows[::-1]
        figure, axes = canvas(
            sheet().column * (1.35 if self.ranked else 1), 0.7 + (0.19 if self.ranked else 0.33) * len(rows)
        )
        ax = axes[0, 0]
        ax.axvline(0, color=self.zero, linewidth=0.9)
        means, ends = [0.0], list[float]()
        for place, row in enumerate(rows):
            colour = row.colour or (style.MUTED if not row.clear else MORE if row.difference < 0 else LESS)
            means += [row.difference, *row.per_seed]
            if not math.isnan(row.margin):
                bar = [row.difference - row.margin, row.difference + row.margin]
                ends += bar
                ax.plot(bar, [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
            fill, mark = colour if row.clear else style.PAPER, "s" if row.is_chance else "o"
            ax.plot(row.difference, place, mark, color=colour, markersize=4, markerfacecolor=fill)
            if len(row.per_seed) > 1:
                ax.plot(row.per_seed, [place - 0.26] * len(row.per_seed), "|", color=colour, markersize=3.5, alpha=0.9)
        ax.set_yticks(range(len(rows)), [plain(row.label) for row in rows], fontsize=sheet().font)
        ax.tick_params(axis="y", length=0, labelcolor=style.INK)
        ax.set_ylim(-0.7, len(rows) - 0.3)
        ax.grid(visible=False, axis="y")
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6))
        numbers_on(ax.xaxis)
        bars = beside(means, ends)
        ax.set_xlim(limits([*means, *bars]))
        ax.set_xlabel(self.x_label)
        caption = f"{self.caption} Bars: 95 % interval, of comparisons together by Holm; hollow: it includes 0."
        if bars != ends:
            caption += " Bars to the edge go on."
        if any(row.is_chance for row in rows):
            caption += " Square: the placebo control, mathematically the baseline: its difference is noise."
        if any(math.isnan(row.margin) for row in rows):
            caption += " No bar: the error is not known."
        if any(len(row.per_seed) > 1 for row in rows):
            caption += " Ticks below: single seeds."
        return Plot(self.name, self.title, caption, figure)


# ------------------------------------------------------------------ losses


def held_out_loss(comparison: Comparison) -> Plot:
    """Draw the mean held-out loss over training. Raises NotShown."""
    figure, (ax,) = panels(1)
    notes = held_out_panel(ax, comparison)
    legend(figure, ax)
    windows = "the same held-out windows for every variant" if comparison.equal else "held-out windows"
    return Plot("held-out-loss", "Held-out loss", f"Mean loss over {windows}.{notes}", figure)


def held_out_panel(ax: Axes, comparison: Comparison) -> str:
    """Draw the curves of `held_out_loss`; return the sentence about them for a caption."""
    ax.set_ylabel(LOSS)
    return _curves(ax, comparison, [one.held_out for one in comparison.variants], marker="o")


def train_loss(comparison: Comparison) -> Plot:
    """Draw the loss on the training batches, smoothed. Raises NotShown."""
    figure, (ax,) = panels(1)
    curves = [{seed: _smooth(points) for seed, points in one.train.items()} for one in comparison.variants]
    notes = _curves(ax, comparison, curves)
    ax.set_ylabel(TRAIN_LOSS)
    legend(figure, ax)
    same = ", which are the same for every variant" if comparison.equal else ""
    caption = f"Loss on the training batches{same}: an exponential mean over about 2 % of the run.{notes}"
    return Plot("train-loss", "Training loss, smoothed", caption, figure)


def difference(comparison: Comparison) -> Plot:
    """Draw the paired differences to the baseline over training, with their 95 % intervals. Raises NotShown."""
    figure, (ax,) = panels(1)
    base, noise = comparison.baseline, comparison.noise()
    settled, edges = [0.0], list[float]()
    if len(noise) > 1:
        where, width = np.array(noise).T
        ax.fill_between(where, -width, width, color=style.MUTED, alpha=0.15, linewidth=0, zorder=0)
    for variant, look in zip(comparison.variants, comparison.looks(), strict=True):
        if variant.label == base:
            ax.axhline(0, linewidth=0.9, **look)
        if len(variant.differences) < 2:
            continue
        place = np.array([part.place for part in variant.differences])
        mean, margin = np.array([(part.effect.difference, part.effect.margin) for part in variant.differences]).T
        ax.fill_between(place, mean - margin, mean + margin, color=look["color"], alpha=0.18, linewidth=0)
        ax.plot(place, mean, marker="o", markersize=2.2, linewidth=1.2, **look)
        late = place >= 0.1 * place[-1]
        settled += [*mean[late]]
        edges += [*(mean - margin)[late], *(mean + margin)[late]]
    if len(settled) == 1:
        raise NotShown("no two measurements that can be compared with the baseline's")
    shown = beside(settled, edges)
    ax.set_ylim(limits([*settled, *shown]))
    _training_axis(ax, comparison)
    numbers_on(ax.yaxis)
    ax.set_ylabel(DIFFERENCE)
    legend(figure, ax)
    over = " or ".join(sorted({part.basis for variant in comparison.variants for part in variant.differences}))
    caption = (
        f"Held-out loss less that of {base}: below the line is better. Bands: interval of the paired difference, 95 % "
        f"by the report's rule, from {over}.{_cut_off(ax)}"
    )
    if len(noise) > 1:
        caption += f" Grey: one standard deviation of the difference of two runs of {base} with other seeds."
    if shown != edges:
        caption += " Bands that leave the axes go on: a few seeds leave them wide."
    return Plot("difference", f"Difference to {base} over training", caption, figure)


def final_difference(comparison: Comparison) -> Plot:
    """Draw each finished variant's difference to the baseline at the end. Raises NotShown."""
    colours = {
        variant.label: look["color"] for variant, look in zip(comparison.variants, comparison.looks(), strict=True)
    }
    complete = all(variant.complete for variant in comparison.variants if variant.label == comparison.baseline)
    shown = [variant for variant in comparison.variants if variant.differences and variant.complete and complete]
    if not shown:
        raise NotShown("no finished run that can be compared with the baseline's")
    rows = [
        Interval(
            variant.label,
            variant.differences[-1].effect.difference,
            variant.differences[-1].effect.margin,
            variant.differences[-1].effect.excludes() and not variant.traits.is_chance,
            colours[variant.label],
            variant.traits.is_chance,
            variant.differences[-1].per_seed,
        )
        for variant in shown
    ]
    title = f"Difference to {comparison.baseline} at the end"
    caption = f"Held-out loss less that of {comparison.baseline}: left of the line is lower."
    zero = colours.get(comparison.baseline or "", style.MUTED)
    return Differences("final-difference", title, caption, DIFFERENCE, rows, zero, ranked=False).draw()


def learning_rates(comparison: Comparison) -> Plot:
    """Draw the final held-out loss against the learning rate, a line for each group. Raises NotShown."""
    shown = [variant for variant in comparison.variants if variant.rate and variant.finals]
    groups = list({variant.group: variant for variant in reversed(shown)}.values())[::-1]
    if len(groups) == len(shown):
        raise NotShown("no variant was trained at several learning rates")
    figure, (ax,) = panels(1)
    lines = dataclasses.replace(
        comparison, variants=[dataclasses.replace(variant, label=variant.group) for variant in groups]
    )
    for group, look in zip(groups, lines.looks(), strict=True):
        points = sorted((variant.rate or 0.0, variant.finals) for variant in shown if variant.group == group.group)
        means = [float(np.mean(finals)) for _, finals in points]
        ax.plot([rate for rate, _ in points], means, marker="o", markersize=3.5, linewidth=1.2, **look)
        for rate, finals in points:
            ax.plot([rate] * len(finals), finals, "_", color=look["color"], markersize=6)
    rates = sorted({variant.rate for variant in shown if variant.rate})
    ax.set_xscale("log")
    ax.set_xticks(rates, [tick(rate) for rate in rates])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(RATE)
    ax.set_ylabel(LOSS)
    legend(figure, ax)
    caption = "Final loss of each variant at each rate; a winner only at one rate would be an artefact of the rate."
    if any(len(variant.finals) > 1 for variant in shown):
        caption += " Ticks: single seeds; points: their means."
    return Plot("learning-rates", "Learning rates", caption, figure)


# ------------------------------------------------------------------ curves


def _curves(ax: Axes, comparison: Comparison, curves: Sequence[Mapping[int, Points]], marker: str = "") -> str:
    """Draw a thick line for each variant, the mean over seeds at their common places, and single seeds thin behind it.

    Raises:
        NotShown: no variant has a curve.
    """
    late = []
    for variant, seeds, look in zip(comparison.variants, curves, comparison.looks(), strict=True):
        name = look.pop("label")
        for points in seeds.values():
            late += [loss for place, loss in points if place >= START * points[-1][0] and math.isfinite(loss)]
            if len(seeds) > 1:
                ax.plot(*zip(*points), linewidth=0.5, alpha=0.35, **look)
        counted = [dict(seeds[seed]) for seed in variant.seeds if seed in seeds]
        if counted:
            places = sorted(set.intersection(*(set(points) for points in counted)))
            mean = [float(np.mean([points[place] for points in counted])) for place in places]
            ax.plot(places, mean, label=name, marker=marker, markersize=2.2, linewidth=1.2, **look)
    if not ax.lines:
        raise NotShown("the runs recorded no such loss")
    ax.set_ylim(limits(late))
    _training_axis(ax, comparison)
    several = any(len(seeds) > 1 for seeds in curves)
    return (" Thin lines are single seeds, the thick one their mean." if several else "") + _cut_off(ax)


def _smooth(points: Points) -> Points:
    """Return the exponential mean over about 2 % of the run, at most 400 points."""
    keep = math.exp(-1 / max(1.0, 0.02 * len(points)))
    smooth, total, weight = [], 0.0, 0.0
    stride = max(1, len(points) // 400)
    for i, (place, loss) in enumerate(points):
        total, weight = keep * total + loss, keep * weight + 1
        if i % stride == 0 or i == len(points) - 1:
            smooth.append((place, total / weight))
    return smooth


def _cut_off(ax: Axes) -> str:
    """Return a caption's sentence about lines that begin outside the axes; the axes contain all later values."""
    low, high = ax.get_ylim()
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.get_lines()])
    outside = np.isfinite(values) & ((values < low) | (values > high))
    return " The steep start is cut off." if outside.any() else ""


def _training_axis(ax: Axes, comparison: Comparison) -> None:
    ax.set_xlabel(comparison.unit)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6))
    numbers_on(ax.xaxis)
