"""Loss against compute at fixed tokens a parameter: the paper's Figure 5 fits and the compute multiplier."""

import math
import statistics
from typing import Any

from attnres.figures.plot import LOSS
from attnres.stats import or_none
from attnres.text import UNKNOWN, number
from attnres.training.config import TrainConfig
from lab.analyses import Fitted, fitted, multiplier, multiplier_interval, pooled, widened
from lab.charts import Curves, Line
from lab.contrast import NO_NOISE
from lab.cost import flops_a_token, vocabulary_of
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult

VARIANTS = ("standard", "block", "full")
ENOUGH = 5
"""Fewest degrees of freedom of the noise for which an interval can exclude a value."""


def steps_for(setting: Setting, run: TrainConfig) -> int:
    """Return the steps that give a model its tokens a parameter, with the parameters N of its 6 N D FLOPs."""
    assert isinstance(run.model.size, dict)
    parameters = flops_a_token(run.model.size, 1, vocabulary_of(run)) / 6
    return max(2, round(setting.preset.tokens_a_parameter * parameters / run.batch_size / run.data.seq_len))


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request an arm for each size of the preset's ladder."""
    parts = []
    for size in setting.preset.ladder:
        run = setting.sized(size, steps=steps_for(setting, setting.sized(size)))
        name = f"d{size['hidden_size']}-layers{size['num_hidden_layers']}"
        parts.append(setting.arm(name, VARIANTS, range(min(2, setting.seeds)), of=run))
    return parts


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report a fit for each mechanism, and the compute that the standard model needs for the same loss at the largest
    size."""
    points = {label: dict[str, tuple[float, float]]() for label in VARIANTS}  # by arm: FLOPs, loss
    rows = []
    for arm in measured.planned:
        for label in measured.labels(arm):
            flops, loss = measured.flops(arm, label), measured.mean(arm, label)
            seeds = len(measured.finals(arm, label))
            if not seeds:
                rows.append([arm, label, UNKNOWN, "diverged", str(seeds)])
                continue
            points[label][arm] = flops, loss
            rows.append([arm, label, f"{flops:.2e}", number(loss, 4), str(seeds)])
    recipes = [one for arm in measured.planned if (one := measured.recipe_of(arm)) is not None]
    known, degrees = pooled((one.sigma, one.degrees) for one in recipes)
    note = f"Noise: sigma {known:.4f} with {degrees} degrees of freedom." if degrees else NO_NOISE
    tables = [ResultTable("Losses", ["size", "variant", "FLOPs", "loss", "seeds"], rows, [note])]
    complete = {label: each for label, each in points.items() if len(each) >= 3}
    shared = set.intersection(*map(set, complete.values())) if complete else set()
    if "standard" not in complete or len(shared) < 3:
        return StudyResult("Too few sizes have finished for a fit.", tables)
    # Residuals of the fits are comparable only for mechanisms with the same sizes.
    sizes = sorted(shared, key=lambda arm: points["standard"][arm])
    compute = {label: [each[arm][0] for arm in sizes] for label, each in complete.items()}
    losses = {label: [each[arm][1] for arm in sizes] for label, each in complete.items()}
    sigma = None
    if degrees:
        counts = (len(measured.finals(arm, label)) for arm in measured.planned for label in measured.labels(arm))
        sigma = widened(known, degrees) / math.sqrt(min(filter(None, counts)))
    floor = None if len(sizes) >= 4 else 0.0
    unit = statistics.geometric_mean(compute["standard"])
    fits = {label: fitted(compute[label], losses[label], sigma, floor, unit) for label in complete}
    # The compute that the standard model needs for a mechanism's loss at its largest size, divided by the mechanism's.
    saved = dict[str, tuple[float, tuple[float, float]]]()
    for label, one in fits.items():
        if label != "standard":
            base, largest = fits["standard"], compute[label][-1]
            saved[label] = multiplier(base.fit, one.fit, largest), multiplier_interval(base, one, largest)
    head = ["variant", "E", "A", "a", f"compute multiplier at {sizes[-1]}"]
    lines = [_row(label, one, saved.get(label)) for label, one in fits.items()]
    fixed = "" if floor is None else " E is held at 0, as in the paper: there are too few sizes to fit it."
    note = f"In brackets 95 % intervals of refitted curves; C in {unit:.2e} FLOPs.{fixed}"
    tables.append(ResultTable("L = E + A C^-a", head, lines, [note]))
    sentences, values = [], dict[str, Any](largest_flops=compute["standard"][-1])
    for label, (ratio, (low, high)) in saved.items():
        words = "excludes 1" if low > 1 or high < 1 else "includes 1"
        if degrees < ENOUGH:
            words = f"includes 1: the noise is known by {degrees} degrees of freedom, expected {ENOUGH}"
        sentences.append(f"{label}: {number(ratio, 2)} times the compute (95 %: {_bounds(low, high)}), {words}.")
        values[label] = {"multiplier": or_none(ratio), "interval": [or_none(low), or_none(high)]}
    return StudyResult(" ".join(sentences), tables, [_chart(compute, losses, fits)], values)


def _chart(compute: dict[str, list[float]], losses: dict[str, list[float]], fits: dict[str, Fitted]) -> Curves:
    lines = []
    for label, one in fits.items():
        x = compute[label]
        lines.append(Line(label, x, losses[label], joined=False))
        curve = [x[0] * (x[-1] / x[0]) ** (i / 24) for i in range(25)]
        lines.append(Line(label, curve, [one.fit.loss(c) for c in curve], dashed=True))
    caption = "Held-out loss against the compute of a run (6 N D, attention and depth reads), with the fits."
    return Curves("scaling", "Scaling", caption, "FLOPs", LOSS, {"": lines}, log_x=True)


def _row(label: str, one: Fitted, saved: tuple[float, tuple[float, float]] | None) -> list[str]:
    cells = [f"{number(getattr(one.fit, n), 3)} ({_bounds(*one.interval(n))})" for n in ("floor", "scale", "exponent")]
    last = "1" if saved is None else f"{number(saved[0], 2)} ({_bounds(*saved[1])})"
    return [label, *cells, last]


def _bounds(low: float, high: float) -> str:
    if math.isnan(low):
        return UNKNOWN
    return f"{number(low, 3)} to {number(high, 3)}" if high < 1e6 else f"{number(low, 3)} upward"


STUDY = Design(
    "scaling",
    "How much compute does depth attention save?",
    "Standard, Block and Full at a ladder of sizes, each with the same tokens a parameter and the recipe's rates, "
    "carried to its width as muP has it, but that heads are not all as wide as the recipe's, which muP asks for.",
    "arXiv 2603.15031: 1.891 C^-.057, Block 1.870 C^-.058, Full 1.865 C^-.057 (C in PFLOP/s-days, 194 M to 528 M "
    "active), 1.25 times the compute at 5.6. marin, data-matched: 1.06 at d = 512, 1.17 at d = 768.",
    arms,
    analyse,
)
