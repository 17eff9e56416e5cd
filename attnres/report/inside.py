"""What the runs' inspection.json say, variants side by side: mixing, entropy, source norms, queries, kinds of tokens.

Runs of earlier versions have no such file; what needs it is left out for them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.figures.depth import last_sources, model_looks
from attnres.figures.dynamics import over_steps
from attnres.figures.geometry import gates, queries
from attnres.figures.mixing import mixing
from attnres.figures.patterns import by_kind, label_sources
from attnres.figures.plot import PAGE, NotShown, canvas, head, log_if_wide, short, thin_ticks
from attnres.report.curves import curves
from attnres.report.plots import Plot, by_depth, seeds_phrase, slug
from attnres.report.runs import Study

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

MEANS = ("mixing", "distance", "persistence", "sharpness", "input_rms", "output_rms", "source_rms")
"""Fields of which several seeds have a mean; queries and examples are each run's own."""
COLUMNS = 3


@dataclass(frozen=True)
class Part:
    """A section: its heading, a sentence or two, and figures, by variant where they are many.

    `plots` have no variant, `folded` are (variant, figures); `broad` says that figures are as wide as the page.
    """

    title: str
    lead: str
    plots: list[Plot]
    folded: list[tuple[str, list[Plot]]] = dataclasses.field(default_factory=list)
    broad: bool = True

    @property
    def every(self) -> list[Plot]:
        """All of its figures."""
        return [*self.plots, *(plot for _, plots in self.folded for plot in plots)]


def inspections(study: Study) -> dict[str, "Inspection"]:
    """For each label with an inspection one under the label's name: that of its first seed, with means over seeds of
    what has one."""
    found = {}
    for label in study.labels:
        seen = [run.inspection for run in study.of(label) if run.inspection is not None]
        if seen:
            found[label] = dataclasses.replace(
                seen[0], model={**seen[0].model, "name": label}, **{name: _mean(seen, name) for name in MEANS}
            )
    return found


def parts(study: Study) -> list[Part]:
    """The sections that apply; draw inside `style.style`."""
    seen = inspections(study)
    models = list(seen.values())
    over = _over_seeds(study)
    found = [
        Part(
            "How much of each output is in each read",
            "Weights of blocks and partial sums, taken apart into what each sublayer wrote: so that a plain residual "
            "stands on the same scale as depth attention.",
            [
                dataclasses.replace(plot, title="Depth mixing matrices")
                for plot in _drawn((lambda: mixing(models),) if models else (), over)
            ],
        ),
        Part(
            "How reads choose, by depth",
            "Over how many sources a read spreads, how far back it reaches, what is left of the embedding and how "
            "strongly its query can choose, on the held-out windows.",
            _choices(study),
            broad=False,
        ),
        Part(
            "How large the sources are",
            "Keys are normed and values are not: a source that is large fills a read that hardly weighs it.",
            _drawn((lambda: source_norms(models),) if models else (), over),
        ),
        Part(
            "Training by depth",
            "What each sublayer writes, the gradient that reaches it and how its read chooses, from the first steps.",
            _drawn((lambda: over_steps([one for one in curves(study) if one.dynamics]),), over),
        ),
        Part(
            "What kinds of token read",
            "Held-out tokens, told apart by what they are: how much they read of the embedding and of other sources.",
            [],
            _by_variant(study, seen, by_kind, label_sources),
        ),
        Part(
            "Which reads ask alike",
            "The learned queries, compared with one another: two reads with like queries choose alike.",
            [],
            _by_variant(study, seen, queries),
        ),
        Part(
            "What is learned besides queries",
            "Gates and biases of reads, or the coefficients of a residual that mixes without a softmax.",
            [],
            _by_variant(study, seen, gates),
        ),
    ]
    return [part for part in found if part.every]


def source_norms(models: Sequence["Inspection"]) -> Plot:
    """RMS of each source of the last read that weighs several, a panel a model.

    Raises:
        NotShown: no model has such a read.
    """
    rows = [(one, look, last_sources(one)) for one, look in zip(models, model_looks(models), strict=True)]
    rows = [row for row in rows if row[2] is not None]
    if not rows:
        raise NotShown("no residual with a softmax over several sources")
    columns = min(COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = canvas(PAGE, 2.3 * lines, lines, columns, sharey=True)
    everything = [value for _, _, last in rows for value in (last or ([], []))[1]]
    for ax in list(axes.flat)[len(rows) :]:
        ax.remove()
    for ax, (one, look, last) in zip(axes.flat, rows):
        names, rms = last or ([], [])
        places = np.arange(len(names))
        ax.plot(places, rms, "o-", color=look["color"], linewidth=0.7, markersize=3 if len(names) < 60 else 1.6)
        log_if_wide(ax, everything)
        thin_ticks(ax.xaxis, places.tolist(), [short(name) for name in names], (PAGE - 1) / columns)
        for tick in ax.get_xticklabels():
            tick.set(rotation=90, ha="center")
        ax.grid(visible=False, axis="x")
        head(ax, str(one.model["name"]))
    for row in axes:
        row[0].set_ylabel("RMS of sources")
    caption = "Root mean square over tokens and width of the sources of the last read, from the first to the newest."
    return Plot("source-norms", "Source norms", caption, figure)


def _choices(study: Study) -> list[Plot]:
    """Entropy, distance, persistence and sharpness of every variant, a figure each."""
    quantities: list[tuple[str, str, str, str, Callable[[Any], Any]]] = [
        (
            "effective-sources",
            "Effective number of sources",
            "effective number of sources",
            "Exp of the mean entropy of a read's weights: over how many sources it would spread evenly to have it",
            lambda one: one.entropy["effective"],
        ),
        (
            "depth-distance",
            "Effective depth distance",
            "sublayers",
            "How many sublayers lie on average between a read and what it reads; a plain residual has half its depth",
            lambda one: one.distance,
        ),
        (
            "embedding-persistence",
            "Embedding persistence",
            "share of the embedding",
            "The embedding's share of each read's coefficients; a plain residual has one over the number of outputs",
            lambda one: one.persistence,
        ),
        (
            "sharpness",
            "Sharpness of the queries",
            "|w g| √d",
            "The largest logit that a read's query can give; zero is a read that weighs all sources alike",
            lambda one: one.sharpness,
        ),
    ]
    found = []
    for name, title, unit, caption, value in quantities:

        def rows(label: str, value: Callable[[Any], Any] = value) -> list[Any]:
            return [value(run.inspection) for run in study.of(label) if run.inspection is not None]

        plot = by_depth(study, rows, name, title, f"{caption}.", unit, reads=True)
        if plot is not None:
            found.append(plot)
    return found


def _over_seeds(study: Study) -> str:
    """What a caption adds where numbers are means over seeds."""
    seeds = {tuple(run.seed for run in study.counted(label)) for label in study.labels}
    if all(len(some) == 1 for some in seeds):
        return ""
    return f" {seeds_phrase(list(seeds.pop())).capitalize()}." if len(seeds) == 1 else " Means over seeds."


def _by_variant(
    study: Study, seen: dict[str, "Inspection"], *figures: Callable[["Inspection"], Plot]
) -> list[tuple[str, list[Plot]]]:
    found = []
    for label, one in seen.items():
        seed = next(run.seed for run in study.of(label) if run.inspection is not None)
        note = f" {seeds_phrase([seed]).capitalize()}." if len(study.of(label)) > 1 else ""
        drawn = [
            dataclasses.replace(plot, name=f"{plot.name}-{slug(label)}")
            for plot in _drawn([partial(figure, one) for figure in figures], note)
        ]
        if drawn:
            found.append((label, drawn))
    return found


def _drawn(figures: Sequence[Callable[[], Plot]], note: str) -> list[Plot]:
    """The figures that apply, with a note at the end of each caption."""
    plots = []
    for draw in figures:
        with suppress(NotShown):
            plot = draw()
            plots.append(dataclasses.replace(plot, caption=plot.caption + note))
    return plots


def _mean(seen: Sequence["Inspection"], name: str) -> Any:
    """Mean of a field over seeds; the first one's where a number is missing or the shapes differ."""
    values = [getattr(one, name) for one in seen]
    return values[0] if len(values) == 1 else _mean_of(values)


def _mean_of(values: Sequence[Any]) -> Any:
    if all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        return [_mean_of(parts) for parts in zip(*values)]
    if all(isinstance(value, int | float) for value in values):
        return float(np.mean(values))
    return values[0]
