"""Loss against compute at a fixed number of tokens a parameter: Figure 5's fits and the compute multiplier."""

import math

from attnres.figures.chart import Curves, Line
from attnres.studies.analyses.noise import widest
from attnres.studies.analyses.scaling import SURE, Fitted, fitted, multiplier, multiplier_interval
from attnres.studies.cost import flops_a_token, vocabulary_of
from attnres.studies.design import Arm, Design, Measured, Result, Setting, Table
from attnres.text import UNKNOWN, number
from attnres.training.config import TrainConfig

VARIANTS = ("standard", "block", "full")
ENOUGH = 5
"""Degrees of freedom of the noise below which nothing is decided."""


def steps_for(setting: Setting, run: TrainConfig) -> int:
    """Steps that give a model its tokens a parameter, counted as the 6 N D of its FLOPs count them."""
    assert isinstance(run.model.size, dict)
    parameters = flops_a_token(run.model.size, 1, vocabulary_of(run)) / 6
    return max(2, round(setting.preset.tokens_a_parameter * parameters / run.batch_size / run.data.seq_len))


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """An arm a size of the preset's ladder."""
    parts = []
    for size in setting.preset.ladder:
        run = setting.sized(size, steps=steps_for(setting, setting.sized(size)))
        name = f"d{size['hidden_size']}-layers{size['num_hidden_layers']}"
        parts.append(setting.arm(name, VARIANTS, range(min(2, setting.seeds)), of=run))
    return parts


def analyse(setting: Setting, measured: Measured) -> Result:
    """A fit a mechanism, and the compute that the standard model needs for the same loss at the largest size."""
    points = {label: dict[float, float]() for label in VARIANTS}
    rows = []
    for arm in measured.planned:
        for label in measured.labels(arm):
            flops, loss = measured.flops(arm, label), measured.mean(arm, label)
            seeds = len(measured.finals(arm, label))
            if not seeds:
                rows.append([arm, label, UNKNOWN, "diverged", str(seeds)])
                continue
            points[label][flops] = loss
            rows.append([arm, label, f"{flops:.2e}", number(loss, 4), str(seeds)])
    tables = [Table("Losses", ["size", "variant", "FLOPs", "loss", "seeds"], rows)]
    complete = {label: each for label, each in points.items() if len(each) >= 3}
    shared = set.intersection(*map(set, complete.values())) if complete else set()
    if "standard" not in complete or len(shared) < 3:
        return Result("Too few sizes have finished for a fit.", tables)
    # What a curve misses of the sizes that it is fitted to is the same for all only where these are.
    complete = {label: {c: each[c] for c in sorted(shared)} for label, each in complete.items()}
    noise, sigma = widest([measured.spread(arm) for arm in measured.planned]), None
    if noise.degrees:
        counts = (len(measured.finals(arm, label)) for arm in measured.planned for label in measured.labels(arm))
        sigma = noise.wide / math.sqrt(min(filter(None, counts)))
    floor = None if len(complete["standard"]) >= 4 else 0.0
    fits = {label: fitted(list(each), list(each.values()), sigma, floor) for label, each in complete.items()}
    largest = max(complete["standard"])
    head = ["variant", "E", "A", "a", "compute multiplier at the largest"]
    tables.append(
        Table("L = E + A C^-a", head, [_row(label, fits, largest) for label in fits], [_note(floor, largest)])
    )
    lines = []
    for label, one in fits.items():
        x = sorted(complete[label])
        lines.append(Line(label, x, [complete[label][c] for c in x], joined=False))
        curve = [x[0] * (x[-1] / x[0]) ** (i / 24) for i in range(25)]
        lines.append(Line(label, curve, [one.fit.loss(c) for c in curve], dashed=True))
    caption = (
        "Held-out loss against the compute of a run (6 N D and attention, without depth reads: under a tenth more "
        "where these are of many sources in a narrow model), with the fits."
    )
    panels = {"": lines}
    charts = [Curves("scaling", "Scaling", caption, "FLOPs", "loss (nats)", panels, log_x=True)]
    sentences, values = [], {}
    for label in fits:
        if label == "standard":
            continue
        ratio = multiplier(fits["standard"].fit, fits[label].fit, largest)
        low, high = multiplier_interval(fits["standard"], fits[label], largest)
        least, most = multiplier_interval(fits["standard"], fits[label], largest, SURE)
        decided = "" if least > 1 or most < 1 else ", which does not exclude 1 by three standard errors"
        if noise.degrees < ENOUGH:
            decided = f", not decided: the noise is known by {noise.degrees} degrees of freedom, expected {ENOUGH}"
        sentences.append(f"{label}: {number(ratio, 2)} times the compute (95 %: {_bounds(low, high)}){decided}.")
        values[label] = {"multiplier": _plain(ratio), "interval": [_plain(low), _plain(high)]}
    return Result(" ".join(sentences), tables, charts, {"largest_flops": largest, **values})


def _row(label: str, fits: dict[str, Fitted], largest: float) -> list[str]:
    one = fits[label]
    cells = [f"{number(getattr(one.fit, n), 3)} ({_bounds(*one.interval(n))})" for n in ("floor", "scale", "exponent")]
    if label == "standard":
        return [label, *cells, "1"]
    ratio = multiplier(fits["standard"].fit, one.fit, largest)
    bounds = _bounds(*multiplier_interval(fits["standard"], one, largest))
    return [label, *cells, f"{number(ratio, 2)} ({bounds})"]


def _note(floor: float | None, largest: float) -> str:
    fixed = "" if floor is None else " E is held at 0, as in the paper: there are too few sizes to fit it."
    return f"In brackets 95 % intervals of refitted curves; A is at the compute's middle; C up to {largest:.2e}.{fixed}"


def _bounds(low: float, high: float) -> str:
    if math.isnan(low):
        return UNKNOWN
    return f"{number(low, 3)} to {number(high, 3)}" if high < 1e6 else f"{number(low, 3)} upward"


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


STUDY = Design(
    "scaling",
    "How much compute does depth attention save?",
    "Standard, Block and Full at a ladder of sizes, each with the same tokens a parameter and the recipe's rates, "
    "carried to its width as muP has it.",
    "arXiv 2603.15031: 1.891 C^-.057, Block 1.870 C^-.058, Full 1.865 C^-.057 (C in PFLOP/s-days, 194 M to 528 M "
    "active), 1.25 times the compute at 5.6. marin, data-matched: 1.06 at d = 512, 1.17 at d = 768.",
    arms,
    analyse,
)
