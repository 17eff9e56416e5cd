"""A lower loss expressed in steps of the standard model."""

import math
import statistics

from attnres.figures.plot import LOSS
from attnres.savings import LossCurve
from attnres.stats import or_none
from attnres.text import number
from lab.charts import Curves, Line
from lab.contrast import NO_NOISE, noise_note
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult

LENGTHS = (0.25, 0.5, 1.0, 2.0)
"""Lengths of runs as fractions of the recipe's steps."""


def lengths(setting: Setting) -> dict[str, int]:
    """Return arm -> steps."""
    counts = {f"x{length:g}": max(1, round(length * setting.preset.steps)) for length in LENGTHS}
    return counts | ({} if setting.preset.many in counts.values() else {"many": setting.preset.many})


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request the standard model at several lengths, each with a complete schedule."""
    return [setting.arm(name, ["standard"], of=setting.config(steps=steps)) for name, steps in lengths(setting).items()]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report the curve, and how many steps 0.01 nats are worth at the recipe's length."""
    curve = {}
    for name, steps in lengths(setting).items():
        if losses := list(measured.finals(name, "standard").values()):
            curve[steps] = statistics.fmean(losses)
    rows = [[f"{steps:,}", number(loss, 4)] for steps, loss in sorted(curve.items())]
    fits = {steps: measured.recipe_of(name) for name, steps in lengths(setting).items() if steps in curve}
    known = {steps: recipe for steps, recipe in fits.items() if recipe is not None and recipe.degrees}
    notes = [f"At {steps:,} steps: {noise_note(recipe)}" for steps, recipe in sorted(known.items())]
    head = ["steps", "loss"]
    table = ResultTable("Loss of the standard model by the length of its run", head, rows, notes or [NO_NOISE])
    if len(curve) < 2:
        return StudyResult("Too few lengths have finished.", [table], [], {"curve": {}})
    rate, steps, worth, far = LossCurve(curve.items()), setting.preset.steps, math.nan, False
    if steps in curve:
        reached, far = rate.tokens(curve[steps] - 0.01)
        worth = 1 - rate.tokens(curve[steps]).tokens / reached
    worth_text = "not known yet" if math.isnan(worth) else f"worth {number(100 * worth, 1)} % of the steps"
    if not math.isnan(worth) and far:
        worth_text += f", by a fit: no run was long enough for it, the longest had {max(curve):,}"
    answer = f"At {steps:,} steps a loss lower by 0.01 is {worth_text}."
    line = Line("standard", rate.at.tolist(), rate.losses.tolist())
    caption = "Held-out loss at the end of runs of different lengths, each with a whole schedule; mean over seeds."
    chart = Curves("exchange", "Loss by length", caption, "steps", LOSS, {"": [line]}, log_x=True)
    values = {
        "curve": {str(n): loss for n, loss in curve.items()},
        "worth_of_0.01": or_none(worth),
    }
    return StudyResult(answer, [table], [chart], values)


STUDY = Design(
    "exchange",
    "How many steps is a gain worth?",
    "The standard model trained for a quarter to twice the recipe's steps: every gain can then be read as steps saved.",
    "modded-nanogpt counts 0.0045 nats for 100 steps of its setup; the paper claims 1.25 times the compute.",
    arms,
    analyse,
)
