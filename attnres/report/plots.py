"""The figures: each a function of a study, drawn in the shared style at the width of a phone's column.

They are kept narrow (5 inches) so that the page can set them side by side on a wide screen and stack them on a narrow
one with the text still readable.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from attnres.figures.plot import Plot, plain
from attnres.report import style
from attnres.report.runs import Run, Study
from attnres.report.stats import equal_conditions, final_loss, kind, kind_name, mean_loss, paired_curve, sweeps_lr
from attnres.report.table import Table
from attnres.text import listed

WIDTH = 5.0


def curve_plots(study: Study, table: Table) -> list[Plot]:
    """Held-out and training loss, difference to the baseline over training and at the end."""
    plots = [held_out_loss(study), train_loss(study), difference_over_training(study, table), final_difference(table)]
    if sweeps_lr(study):
        plots.append(loss_by_lr(study))
    return [plot for plot in plots if plot is not None]


def depth_plots(study: Study) -> list[Plot]:
    """Output and gradient magnitude by depth."""
    plots = [
        magnitude(study, "output_rms", "Output magnitude by depth", "RMS of what each sublayer writes"),
        magnitude(study, "input_rms", "Input magnitude by depth", "RMS of what each sublayer reads, before its norm"),
        magnitude(study, "grad_rms", "Gradient magnitude by depth", "RMS of the loss's gradient at each output"),
    ]
    return [plot for plot in plots if plot is not None]


# ------------------------------------------------------------------ curves


def held_out_loss(study: Study) -> Plot | None:
    if not any(run.val for run in study.runs):
        return None
    figure, ax = _figure(3.2)
    for label, look in style.looks(study).items():
        runs = [run for run in study.of(label) if run.val]
        curves = {run.seed: {record["step"]: record["loss"] for record in run.val} for run in runs}
        _seeds_and_mean(ax, study, label, curves, look, marker="o")
    _clip_start(ax, [(run, [(r["step"], r["loss"]) for r in run.val]) for run in study.runs])
    ax.set_ylabel("held-out loss, nats per token")
    _finish(ax)
    seeds = " Thin lines are single seeds, the thick one their mean." if _several_seeds(study) else ""
    windows = "the same held-out windows for every variant" if _comparable(study) else "held-out windows"
    caption = f"Mean loss over {windows}.{seeds}{_cut_off(ax)}"
    return Plot("held-out-loss", "Held-out loss", caption, figure)


def train_loss(study: Study) -> Plot | None:
    if not any(len(run.train) > 1 for run in study.runs):
        return None
    figure, ax = _figure(3.2)
    smoothed = []
    for label, look in style.looks(study).items():
        runs = [run for run in study.of(label) if len(run.train) > 1]
        curves = {run.seed: _smooth(run) for run in runs}
        smoothed += [(run, list(curves[run.seed].items())) for run in runs]
        _seeds_and_mean(ax, study, label, curves, look)
    _clip_start(ax, smoothed)
    ax.set_ylabel("training loss, nats per token")
    _finish(ax)
    same = ", which are the same for every variant" if _comparable(study) else ""
    caption = f"Loss on the training batches{same}: an exponential mean over about 2 % of the run.{_cut_off(ax)}"
    return Plot("train-loss", "Training loss, smoothed", caption, figure)


def difference_over_training(study: Study, table: Table) -> Plot | None:
    base = table.baseline
    curves = {label: paired_curve(study, label, base) for label in study.labels if base and label != base}
    curves = {label: curve for label, curve in curves.items() if len(curve) > 1}
    if base is None or not curves:
        return None
    figure, ax = _figure(3.2)
    looks = style.looks(study)
    ax.axhline(0, color=looks[base]["color"], linewidth=1.2)
    settled = []
    for label, curve in curves.items():
        run = study.of(label)[0]
        tokens = np.array([run.tokens_at(pair.step) for pair in curve])
        mean = np.array([pair.mean for pair in curve])
        margin = np.array([pair.margin for pair in curve])  # NaN, from a single window, leaves the band out
        ax.fill_between(tokens, mean - margin, mean + margin, color=looks[label]["color"], alpha=0.18, linewidth=0)
        ax.plot(tokens, mean, marker="o", markersize=3, label=plain(label), **looks[label])
        late = np.array([pair.step for pair in curve]) >= 0.1 * curve[-1].step
        settled += [*mean[late], *(mean - margin)[late], *(mean + margin)[late]]
    _limits(ax, [0.0, *settled])
    ax.set_ylabel("difference, nats per token")
    _token_axis(ax, study)
    _finish(ax)
    basis = {curve[-1].basis for curve in curves.values()}
    over = "seeds" if basis == {"seeds"} else "held-out windows" if basis == {"windows"} else "seeds or windows"
    caption = f"Below the line is better than {base}. Bands: 95 % interval of the paired difference, over {over}."
    return Plot("difference", f"Difference to {base} over training", caption, figure)


def final_difference(table: Table) -> Plot | None:
    rows = [row for row in table.rows if row.paired is not None and row.complete]
    if not rows:
        return None
    figure, ax = _figure(1.0 + 0.5 * len(rows))
    ax.axvline(0, color=style.COLOURS["standard"], linewidth=1.2)
    for y, row in enumerate(reversed(rows)):
        pair = row.paired
        assert pair is not None
        colour = style.colour_of(row.residual)
        if not math.isnan(pair.margin):
            ends = [pair.mean - pair.margin, pair.mean + pair.margin]
            ax.plot(ends, [y, y], color=colour, linewidth=2.6, solid_capstyle="butt")
        ax.plot(
            pair.mean, y, "o", color=colour, markersize=6.5, markerfacecolor=colour if pair.decided else style.PAPER
        )
        if len(pair.per_seed) > 1:
            ax.plot(pair.per_seed, [y - 0.26] * len(pair.per_seed), "|", color=colour, markersize=5, alpha=0.9)
    ax.set_yticks(range(len(rows)), [plain(row.label) for row in reversed(rows)])
    ax.tick_params(axis="y", length=0, labelcolor=style.INK)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6))
    ax.set_xlabel("difference in held-out loss, nats per token")
    caption = "Left of the line is better. Bars: 95 % interval of the paired difference; hollow: within the error."
    if any(row.paired and math.isnan(row.paired.margin) for row in rows):
        caption += " No bar: the error is not known."
    if any(row.paired and len(row.paired.per_seed) > 1 for row in rows):
        caption += " Ticks below: single seeds."
    return Plot("final-difference", f"Difference to {table.baseline} at the end", caption, figure)


def loss_by_lr(study: Study) -> Plot | None:
    """Final held-out loss against learning rate, one line a variant."""
    figure, ax = _figure(3.1)
    rates = sorted({run.lr for run in study.runs if run.lr})
    dashes: Counter[str] = Counter()
    for which in dict.fromkeys(kind(run) for run in study.runs):
        points, name = {}, ""
        for label in study.labels:
            runs = [run for run in study.of(label) if run.finished]
            loss, _ = mean_loss(study, label)
            if runs and kind(runs[0]) == which and runs[0].lr and not math.isnan(loss):
                points[runs[0].lr] = (loss, [final_loss(run) for run in runs])
                name = name or kind_name(study, label)
        if not points:
            continue
        colour, dash = style.colour_of(which[0]), style.DASHES[dashes[which[0]] % len(style.DASHES)]
        dashes[which[0]] += 1
        xs = sorted(points)
        ax.plot(xs, [points[x][0] for x in xs], "o", linestyle=dash, color=colour, markersize=5, label=plain(name))
        for x in xs:
            ax.plot([x] * len(points[x][1]), points[x][1], "_", color=colour, markersize=9)
    ax.set_xscale("log")
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("peak learning rate")
    ax.set_ylabel("final held-out loss, nats per token")
    _finish(ax)
    caption = "Each variant at each rate; a winner only at one rate would be an artefact of the rate."
    return Plot("learning-rates", "Learning rates", caption, figure)


# ------------------------------------------------------------------ depth


def magnitude(study: Study, key: str, title: str, what: str) -> Plot | None:
    """One quantity at every sublayer, for each variant, at the last measurement."""

    def rows(label: str) -> list[Any]:
        return [run.depth[-1].get(key) for run in study.counted(label) if run.depth]

    caption = f"{what}, at the last measurement of the run."
    return by_depth(study, rows, key.replace("_", "-"), title, caption, "RMS", reads=key == "input_rms")


def by_depth(
    study: Study,
    rows: Callable[[str], list[Any]],
    name: str,
    title: str,
    caption: str,
    unit: str,
    *,
    reads: bool,
) -> Plot | None:
    """A line a variant over the sublayers, or over the `reads`, of which the output's is the last.

    `rows(label)`: a row of numbers for each seed; None for what does not exist.
    """
    lines = {}
    for label in study.labels:
        found = [np.array([np.nan if value is None else value for value in row], float) for row in rows(label) if row]
        if found and len({len(row) for row in found}) == 1 and np.isfinite(found).any():
            lines[label] = np.stack(found)  # (seeds, sublayers)
    if not lines:
        return None
    figure, ax = _figure(3.1)
    looks = style.looks(study)
    for label, values in lines.items():
        depth = np.arange(values.shape[1])
        if len(values) > 1:
            ax.fill_between(
                depth, values.min(axis=0), values.max(axis=0), color=looks[label]["color"], alpha=0.15, linewidth=0
            )
        mean = values.mean(axis=0)
        ax.plot(depth, mean, label=plain(label), **looks[label])
        # Even sublayers are attention, odd ones MLP: filled and hollow.
        inner = len(mean) - reads
        ax.plot(depth[0:inner:2], mean[0:inner:2], "o", color=looks[label]["color"], markersize=3.6)
        hollow: dict[str, Any] = {"markerfacecolor": style.PAPER, "markeredgewidth": 1.2}
        ax.plot(depth[1:inner:2], mean[1:inner:2], "o", color=looks[label]["color"], markersize=3.6, **hollow)
        ax.plot(depth[inner:], mean[inner:], "D", color=looks[label]["color"], markersize=4)
    everything = np.concatenate([values.ravel() for values in lines.values()])
    positive = everything[np.isfinite(everything) & (everything > 0)]
    if len(positive) and positive.max() > 4 * positive.min() and unit == "RMS":
        ax.set_yscale("log")
        _plain_log_ticks(ax, positive)
    elif unit != "RMS":
        ax.set_ylim(bottom=0)
    longest = max(values.shape[1] for values in lines.values())
    ax.set_xlim(-0.05 * longest, 1.05 * longest - 1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    ax.set_xlabel("sublayer that reads" if reads else "sublayer")
    ax.set_ylabel(unit)
    _finish(ax)
    marks = " Filled points: attention, hollow: MLP" + (", diamond: the output." if reads else ".")
    over = " Lines: means over seeds; bands: least to most." if any(len(v) > 1 for v in lines.values()) else ""
    return Plot(name, title, f"{caption}{marks}{over}", figure)


# ------------------------------------------------------------------ helpers


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(ax: Axes) -> None:
    """Legend above the axes, in as many columns as fit."""
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), int(58 / (longest + 6))))
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2)


def _comparable(study: Study) -> bool:
    return len(study.labels) > 1 and equal_conditions(study)


def _cut_off(ax: Axes) -> str:
    """What a caption says of lines that begin above the axes."""
    top = ax.get_ylim()[1]
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in ax.get_lines()]
    return " The steep start is cut off." if any(len(line) and line[0] > top for line in lines) else ""


def _several_seeds(study: Study) -> bool:
    return any(len(study.of(label)) > 1 for label in study.labels)


def _seeds_and_mean(
    ax: Axes, study: Study, label: str, curves: dict[int, dict[int, float]], look: dict[str, Any], marker: str = ""
) -> None:
    """One thick line, the mean over seeds at their common steps; single seeds thin behind it.

    `curves`: of each seed that has one, values by step.
    """
    runs = [run for run in study.counted(label) if run.seed in curves]
    if not runs:
        return
    if len(curves) > 1:
        for run in study.of(label):
            mine = curves.get(run.seed, {})
            ax.plot([run.tokens_at(step) for step in mine], list(mine.values()), linewidth=0.7, alpha=0.35, **look)
    counted = [curves[run.seed] for run in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in counted)))
    mean = [float(np.mean([curve[step] for curve in counted])) for step in steps]
    ax.plot([runs[0].tokens_at(step) for step in steps], mean, label=plain(label), marker=marker, markersize=3, **look)


def _smooth(run: Run) -> dict[int, float]:
    """Exponential mean over about 2 % of the run, at most 400 points."""
    steps = [record["step"] for record in run.train]
    losses = [float(record["loss"]) for record in run.train]
    keep = math.exp(-1 / max(1.0, 0.02 * len(losses)))
    smooth, total, weight = {}, 0.0, 0.0
    stride = max(1, len(steps) // 400)
    for i, (step, loss) in enumerate(zip(steps, losses, strict=True)):
        total, weight = keep * total + loss, keep * weight + 1
        if i % stride == 0 or i == len(steps) - 1:
            smooth[step] = total / weight
    return smooth


def _clip_start(ax: Axes, curves: list[tuple[Run, list[tuple[int, float]]]]) -> None:
    """Show what comes after the first eighth of the run; before it the loss falls too steeply to share an axis."""
    shown = []
    for _, points in curves:
        last = max((step for step, _ in points), default=0)
        shown += [loss for step, loss in points if step >= last / 8 and math.isfinite(loss)]
    _limits(ax, shown)
    _token_axis_of(ax, [run for run, _ in curves])


def _limits(ax: Axes, values: list[float]) -> None:
    values = [value for value in values if math.isfinite(value)]
    if values:
        low, high = min(values), max(values)
        pad = 0.06 * (high - low) or 0.01
        ax.set_ylim(low - pad, high + pad)


def _token_axis(ax: Axes, study: Study) -> None:
    _token_axis_of(ax, study.runs)


def _token_axis_of(ax: Axes, runs: list[Run]) -> None:
    counted = any(record.get("tokens") for run in runs for record in run.train[-1:])
    ax.set_xlabel("training tokens" if counted else "step")
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6))
    ax.xaxis.set_major_formatter(FuncFormatter(_short))


def _short(value: float, _: int = 0) -> str:
    """1500000 -> 1.5M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _plain_log_ticks(ax: Axes, values: np.ndarray) -> None:
    """Ticks at 1, 2, 5 times powers of ten when the range is short, at powers of ten when it is long."""
    decades = math.log10(values.max() / values.min())
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=12))
    plain: Callable[[float, int], str] = lambda value, _: f"{value:g}"  # noqa: E731
    if values.min() >= 1e-4 and values.max() < 1e5:
        ax.yaxis.set_major_formatter(FuncFormatter(plain))
    ax.yaxis.set_minor_formatter(NullFormatter())


def seeds_phrase(seeds: list[int]) -> str:
    return f"mean over seeds {listed([str(seed) for seed in seeds])}" if len(seeds) > 1 else f"seed {seeds[0]}"


def slug(label: str) -> str:
    """A label as part of a file's or an element's name."""
    return "".join(character if character.isalnum() else "-" for character in label)
