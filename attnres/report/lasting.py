"""What lasts of an early lead, beside runs that are too short to show it: measured curves of the same model.

`lasting.csv` has the runs of docs/results.md, section 10, as `attnres report` gives them:

    grep -hE '^(label|standard,|block,)' docs/data/lasting_seeds/curves.csv
    grep -hE '^(full,|block-residual_lr0.004,)' docs/data/lasting_runs/curves.csv
"""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from attnres.figures import Comparison, Plot, Variant
from attnres.figures.comparison import Difference
from attnres.figures.losses import difference
from attnres.figures.plot import TOKENS
from attnres.figures.style import MUTED
from attnres.report.runs import Run, Study
from attnres.report.stats import interval
from attnres.residuals import traits_of
from attnres.stats import standard_error
from attnres.text import with_error

SIZE, BASELINE = "nano", "standard"
DEPTH_READS = ("block", "full")
WHOLE_RATE = "block-residual_lr0.004"


@cache
def measured() -> Comparison:
    """The long runs, with Block's and Full's differences to the standard residual of the same seed."""
    runs: dict[str, dict[int, list[dict[str, str]]]] = {}
    for row in csv.DictReader((files("attnres.report") / "lasting.csv").read_text(encoding="utf-8").splitlines()):
        runs.setdefault(row["label"], {}).setdefault(int(row["seed"]), []).append(row)
    variants = []
    for label, seeds in runs.items():
        residual = label.partition("-")[0]
        losses = {seed: [(float(row["tokens"]), float(row["loss"])) for row in rows] for seed, rows in seeds.items()}
        places = [] if label == BASELINE else zip(*seeds.values(), strict=True)
        differences = [_difference(rows, len(runs) - 1) for rows in places]
        variants.append(
            Variant(label, residual, traits_of(residual), seeds=list(seeds), held_out=losses, differences=differences)
        )
    return Comparison(variants, baseline=BASELINE, unit=TOKENS, equal=True)


def _difference(rows: Sequence[Mapping[str, str]], comparisons: int) -> Difference:
    """The mean over seeds at one place, one of so many that are looked at together. The files have no single windows,
    so that their error is the seeds' mean one, which the error of the mean does not exceed."""
    values = np.array([float(row["difference"]) for row in rows])
    se_windows = float(np.mean([float(row["difference_se_windows"]) for row in rows]))
    basis, _, margin = interval(se_windows, int(rows[0]["windows"]), standard_error(values), len(rows), comparisons)
    return Difference(float(rows[0]["tokens"]), float(values.mean()), margin, basis, tuple(values))


def tokens_of(study: Study) -> float | None:
    """How many tokens the longest run saw, if the long runs are this model's and longer, and say something of these."""

    def applies(run: Run) -> bool:
        config = run.config
        return config["model"].get("size") == SIZE and not config.get("finetune", {}).get("init_from")

    if study.baseline != BASELINE or not all(applies(run) for run in study.runs):
        return None
    if not {run.residual for run in study.runs} & set(DEPTH_READS):
        return None
    seen = max(run.tokens_at(run.last_step) for run in study.runs)
    return seen if seen < _end() / 2 else None


def _end() -> float:
    return max(place for one in measured().variants for points in one.held_out.values() for place, _ in points)


def lead(seen: float) -> str:
    """What the long runs say, in words."""
    by_label = {one.label: one for one in measured().variants}
    block, whole = by_label["block"], by_label[WHOLE_RATE]
    first, last, fast = block.differences[0], block.differences[-1], whole.differences[-1]
    return (
        f"The runs of this page end at {seen / 1e6:.1f} M tokens: they say who learns faster early. The same model was "
        f"trained on {_end() / 1e6:.1f} M tokens of English (docs/results.md, section 10). Block's loss minus the "
        f"standard residual's is {_with_margin(first)} at {first.place / 1e6:.1f} M there and {_with_margin(last)} at "
        f"the end (mean of {len(block.seeds)} seeds, half of the 95 % interval); with queries at ten times the default "
        f"rate {_with_margin(fast)} at the end (one seed)."
    )


def _with_margin(one: Difference) -> str:
    return with_error(one.mean, one.margin, signed=True)


def figure(seen: float) -> Plot:
    """The long runs' differences over training, and where the shorter ones ended."""
    plot = difference(measured())
    plot.figure.axes[0].axvline(seen, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))
    caption = f"{plot.caption} Dashed upright: where the runs of this page end."
    return Plot("lasting", "Difference to standard over ten million tokens", caption, plot.figure)
