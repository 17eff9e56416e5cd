"""A study's runs as the figures take them."""

from collections.abc import Sequence
from typing import Any

from attnres.figures.comparison import Comparison, Difference, Points, Variant
from attnres.figures.plot import STEP, TOKENS
from attnres.inspect.inspection import dynamics
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


def comparison_of(study: Study) -> Comparison:
    """Everything that the figures draw of a study, each label's runs as one variant."""
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
            Difference(runs[0].tokens_at(pair.step), pair.mean, pair.margin, pair.basis, pair.per_seed)
            for pair in pairs
        ],
        group=kind_name(study, label),
        rate=runs[0].lr,
        finals=[final_loss(run) for run in counted if run.finished],
        complete=all(run.finished for run in runs),
    )


def _points(run: Run, records: Sequence[dict[str, Any]]) -> Points:
    return [(run.tokens_at(record["step"]), float(record["loss"])) for record in records]
