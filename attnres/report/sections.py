"""The sections of the page that hold figures: the figures of each, the text above them, and the coloured text."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.figures import FIGURES, Plot
from attnres.figures.comparison import Comparison, LossDifference, Points, Variant
from attnres.figures.patterns import differ
from attnres.figures.plot import STEP, TOKENS, NotShown
from attnres.figures.tokens import example_columns
from attnres.figures.write import noted
from attnres.inspect.inspection import FIELD, Inspection, amounts, by_in, dynamics
from attnres.inspect.notebook import end_of_scale
from attnres.report.runs import Run, Study
from attnres.report.stats import (
    Paired,
    against,
    equal_conditions,
    final_loss,
    kind_name,
    paired_curve,
    strongest_baseline,
)
from attnres.residuals import Source
from attnres.text import number

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


SECTIONS = {
    "Training": "",
    "Contributions to each layer's input": (
        "Average contribution of each source (column) to each layer's input (row) over held-out tokens. Rows "
        "sum to one; orange points against the sum. The weights are folded below: a source with a large norm can "
        "dominate a sum even with a small weight."
    ),
    "Magnitudes by depth": "How large values and gradients are along the depth.",
    "Contributions of every sublayer": (
        "The same with blocks and partial sums taken apart into what each sublayer wrote, so that a plain residual "
        "stands on the same scale as depth attention."
    ),
    "How layers choose their sources": (
        "Over how many sources the weights of a layer's input spread, how far back they reach, what is left of the "
        "embedding and how strongly its query can choose, on the held-out windows."
    ),
    "Size of the sources": (
        "A source with a large norm can dominate a sum even with a small weight, because weights are computed from "
        "normalised keys."
    ),
    "Training by depth": (
        "What each sublayer writes, the gradient that reaches it and how sharply its query chooses, over training."
    ),
    "Contributions by kind of token": "Held-out tokens, told apart by what they are.",
    "Similarity of the layers' queries": (
        "Cosine of the learned queries: layers that look for the same thing are alike."
    ),
    "Other learned parameters": "Gates and biases, or the coefficients of a residual that mixes without a softmax.",
}
"""Section titles in the order of the page, with the text under each. Figures name their section in
`attnres.figures.write.FIGURES`."""


@dataclass(frozen=True)
class Section:
    """A heading, the text under it, and its figures; `folded` holds figures of single variants by the title of their
    fold."""

    title: str
    lead: str
    plots: list[Plot] = field(default_factory=list)
    folded: dict[str, list[Plot]] = field(default_factory=dict)

    @property
    def every(self) -> list[Plot]:
        """Return all figures of the section."""
        return [*self.plots, *(plot for plots in self.folded.values() for plot in plots)]


def sections(comparison: Comparison) -> list[Section]:
    """Return the sections that have figures; draw inside `style.style`."""
    result = {title: Section(title, lead) for title, lead in SECTIONS.items()}
    for figure in FIGURES:
        if not figure.section:
            continue
        section = result[figure.section]
        if figure.needs:
            having = comparison.having(figure.needs)
            if figure.each:
                having = having.once()
            with suppress(NotShown):
                if having.variants:
                    section.plots.append(figure.compared(having))
            continue
        for variant in comparison.having("inspections").variants:
            with suppress(NotShown):
                if figure.mean and _says_nothing(variant.mean, figure.folded):
                    continue
                plot = noted(figure.draw(variant.mean), [variant], mean=figure.mean)
                plot = dataclasses.replace(plot, name=f"{figure.name}-{slug(variant.label)}")
                fold = figure.folded or ("" if figure.mean else variant.label)
                if variant not in comparison.once().variants:
                    fold = f"{variant.label}: the baseline's function, seen twice"
                (section.folded.setdefault(fold, []) if fold else section.plots).append(plot)
    return [section for section in result.values() if section.every]


def _says_nothing(inspection: Inspection, folded: str) -> bool:
    """Return whether a figure would show the constant weights of a plain sum, or the same weights twice for a file
    without contributions."""
    by = by_in("contribution", inspection.routing)
    return not differ(inspection, "weight" if folded else by) or (bool(folded) and by == "weight")


def slug(label: str) -> str:
    """Return a label as a part of a file's or an element's name."""
    return "".join(character if character.isalnum() else "-" for character in label)


# ------------------------------------------------------------------ what the figures draw


def comparison_of(study: Study) -> Comparison:
    """Return the data that the figures of a study need, with each label's runs as one variant."""
    baseline = strongest_baseline(study)
    last = against(study, baseline) if baseline else {}
    counted = any(record.get("tokens") for run in study.runs for record in run.train[-1:])
    return Comparison(
        [_variant(study, label, baseline, last.get(label)) for label in study.labels],
        baseline=baseline,
        unit=TOKENS if counted else STEP,
        equal=len(study.labels) > 1 and equal_conditions(study),
    )


def _variant(study: Study, label: str, baseline: str | None, last: Paired | None) -> Variant:
    runs, counted = study.of(label), study.counted(label)
    recorded = {run.seed: dynamics(run.depth) for run in counted}
    pairs = paired_curve(study, last, label, baseline) if baseline and last else []
    return Variant(
        label,
        runs[0].residual,
        runs[0].traits,
        seeds=[run.seed for run in counted],
        inspections={run.seed: run.inspection for run in counted if run.inspection is not None},
        dynamics={seed: one for seed, one in recorded.items() if one is not None},
        held_out={run.seed: _points(run, run.val) for run in runs if run.val},
        train={run.seed: _points(run, run.train) for run in runs if len(run.train) > 1},
        differences=[
            LossDifference(runs[0].tokens_at(pair.step), pair.effect, pair.basis, pair.per_seed) for pair in pairs
        ],
        group=kind_name(study, label),
        rate=runs[0].lr,
        finals=[final_loss(run) for run in counted if run.finished],
        complete=all(run.finished for run in runs),
    )


def _points(run: Run, records: Sequence[dict[str, Any]]) -> Points:
    return [(run.tokens_at(record["step"]), float(record["loss"])) for record in records]


# ------------------------------------------------------------------ one text, token by token


READS = 4
"""Number of a model's reads that are shown."""
DEEPEST = 65
"""Largest opacity of the colour, in percent, at which text is still readable."""
NAMED = 2
"""Number of sources in a token's tooltip."""


def example(inspection: "Inspection") -> str:
    """Return the text as HTML, once for each read with which a block begins and for the output's, coloured by one
    source (`attnres.figures.tokens.example_columns`). Empty if the model has no such read, or its numbers are the same
    for every token."""
    try:
        columns = example_columns(inspection, "contribution", READS + 1)[-READS:]
    except NotShown:
        return ""
    words: Any = inspection.example
    blocks = []
    for routing, row, place, values in columns:
        if len(values) > 1 and np.ptp(values) < 1e-6:
            continue
        read = routing.layout[row]
        top = end_of_scale(values)
        rows = words[FIELD[routing.by]][inspection.layout.index(read)]
        parts = zip(words["tokens"], words["kinds"], rows, np.nan_to_num(values / top), strict=True)
        tokens = [
            _token(text, kind, amounts(row, routing.by), read.sources, float(part)) for text, kind, row, part in parts
        ]
        what = f"{read.label}, {routing.by} of {read.sources[place].label}"
        numbers = [number(float(value), 2) for value in (values.mean(), np.abs(values).max())]
        lead = f"{what}: mean {numbers[0]}, largest {numbers[1]}"
        blocks.append(f'<div><h3>{escape(lead)}</h3><pre class="tokens">{"".join(tokens)}</pre></div>')
    return f'<div class="figures texts">{"".join(blocks)}</div>' if blocks else ""


def _token(text: str, kind: str, values: np.ndarray, sources: Sequence[Source], part: float) -> str:
    most = np.argsort(-np.abs(values))[:NAMED]
    title = f"{kind}: " + ", ".join(f"{sources[i].label} {number(float(values[i]), 2)}" for i in most)
    sign = ' class="less"' if part < 0 else ""
    size = f"--w:{DEEPEST * abs(part):.0f}%"
    return f'<span{sign} style="{size}" title="{escape(title, quote=True)}">{escape(text)}</span>'
