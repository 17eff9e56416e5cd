"""What the runs of a study recorded over their steps, as the figures of training take it."""

from collections.abc import Sequence

import numpy as np

from attnres.figures.dynamics import Curves
from attnres.inspect.measures import dynamics
from attnres.report.runs import Run, Study


def curves(study: Study) -> list[Curves]:
    """Held-out loss and what was recorded by depth, for each label as means over its seeds at their common steps."""
    result = []
    for label in study.labels:
        runs = [run for run in study.counted(label) if run.val or run.depth]
        if not runs:
            continue
        losses = [{record["step"]: record["loss"] for record in run.val} for run in runs]
        steps = sorted(set.intersection(*(set(loss) for loss in losses)))
        loss = [(step, float(np.mean([one[step] for one in losses]))) for step in steps]
        result.append(Curves(label, study.residual(label), loss, _mean_dynamics(runs)))
    return result


def _mean_dynamics(runs: Sequence[Run]) -> dict[str, list]:
    """`attnres.inspect.measures.dynamics` as means over runs; of the first alone if they recorded at other steps."""
    found = [dynamics(run.depth) for run in runs]
    kept = [one for one in found if one is not None]
    if not kept:
        return {}
    first = kept[0]
    if any(one["steps"] != first["steps"] or set(one) != set(first) for one in kept):
        return first
    rows = {name: np.array([one[name] for one in kept], dtype=float) for name in first if name != "steps"}
    return {"steps": first["steps"], **{name: values.mean(0).tolist() for name, values in rows.items()}}
