"""What lasts of an early lead, beside runs that are too short to show it: measured curves of the same model.

`lasting.csv` has the runs of docs/results.md, section 10, as `attnres report` gives them:

    grep -hE '^(label|standard,|block,)' docs/data/lasting_seeds/curves.csv
    grep -hE '^(full,|block-residual_lr0.004,)' docs/data/lasting_runs/curves.csv
"""

import csv
import math
from functools import cache
from importlib.resources import files

import numpy as np

from attnres.figures import Comparison, Plot, Variant
from attnres.figures.comparison import Difference
from attnres.figures.losses import difference
from attnres.figures.style import MUTED
from attnres.report.runs import Run, Study
from attnres.residuals import traits_of
from attnres.stats import standard_error, t_975
from attnres.text import with_error

SIZE, BASELINE = "nano", "standard"
DEPTH_READS = ("block", "full")
WHOLE_RATE = "block-residual_lr0.004"


@cache
def measured() -> Comparison:
    """The long runs, with Block's and Full's differences to the standard residual of the same seed."""
    rows = list(csv.DictReader((files("attnres.report") / "lasting.csv").read_text(encoding="utf-8").splitlines()))
    variants = []
    for label in dict.fromkeys(row["label"] for row in rows):
        by_seed: dict[int, list[dict[str, str]]] = {}
        for row in rows:
            if row["label"] == label:
                by_seed.setdefault(int(row["seed"]), []).append(row)
        residual = label.partition("-")[0]
        variants.append(
            Variant(
                label,
                residual,
                traits_of(residual),
                seeds=list(by_seed),
                held_out={
                    seed: [(float(row["tokens"]), float(row["loss"])) for row in mine] for seed, mine in by_seed.items()
                },
                differences=[_difference(at) for at in zip(*by_seed.values(), strict=True) if label != BASELINE],
            )
        )
    return Comparison(variants, baseline=BASELINE, unit="training tokens", equal=True)


def _difference(rows: tuple[dict[str, str], ...]) -> Difference:
    """The mean over seeds at one place; of its intervals over windows and over seeds the wider one."""
    values = np.array([float(row["difference"]) for row in rows])
    errors = [float(row["difference_se_windows"]) for row in rows]
    over_windows = t_975(int(rows[0]["windows"]) - 1) * float(np.mean(errors))
    over_seeds = t_975(len(rows) - 1) * standard_error(values) if len(rows) > 2 else -math.inf
    basis = "seeds" if over_seeds > over_windows else "windows"
    return Difference(
        float(rows[0]["tokens"]), float(values.mean()), max(over_windows, over_seeds), basis, tuple(values)
    )


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
