"""Does the gap last? Standard and Block at half, one, two and four times a budget, as branches of one long run."""

import dataclasses
import math
import statistics

from attnres.figures.plot import DIFFERENCE, TOKENS
from attnres.savings import LossCurve, saving
from attnres.stats import Effect, Recipe, or_none
from attnres.text import UNKNOWN, number, run_name
from attnres.training.config import TrainConfig
from lab.analyses import pooled, trend
from lab.charts import Curves, Line
from lab.contrast import NO_NOISE, interval, times_fewer
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult, branch_step

BUDGETS = (0.5, 1.0, 2.0, 4.0)
VARIANTS = ("standard", "block")
WARM_UP, DECAY = 0.05, 0.2
"""Warm-up as a fraction of the unit's steps; decay as a fraction of each run's."""


READ = (
    "Tokens saved: how many times Block's tokens the standard model needs for the same loss, between measured budgets, "
    "beyond the longest by a fit."
)


def unit(setting: Setting) -> int:
    """Return the steps of one budget: four budgets are 20 tokens a parameter at nano."""
    return max(8, setting.preset.steps * 7 // 5)


def config(setting: Setting, budget: float) -> TrainConfig:
    """Return the run of a budget: the common warm-up, a constant learning rate, then its own decay."""
    steps = round(budget * unit(setting))
    warm = max(1, round(WARM_UP * unit(setting)))
    optim = {"schedule": "wsd", "warmup": warm / steps, "decay": DECAY, "min_lr_ratio": 0.0}
    return setting.config(steps=steps, optim=optim)


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request the longest run of each seed, which keeps checkpoints; then the other budgets' decays for seeds that have
    it."""
    *shorter, longest = BUDGETS
    steps = tuple(sorted({branch_step(config(setting, budget)) for budget in shorter}))
    trunk = dataclasses.replace(config(setting, longest), keep_at=steps)
    first = setting.arm(f"x{longest:g}", VARIANTS, of=trunk)
    ended = measured.finished.get(first.name, [])
    seeds = [seed for seed in range(setting.seeds) if all(run_name(label, seed) in ended for label in VARIANTS)]
    if not seeds:
        return [first]
    branches = {f"x{budget:g}": config(setting, budget) for budget in shorter}
    return [first, *(setting.arm(name, VARIANTS, seeds, of=run, trunk=first.name) for name, run in branches.items())]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report the gap to the standard model at each budget, and its slope."""
    tokens_a_step = setting.config().batch_size * setting.config().data.seq_len
    losses = {label: dict[float, list[float]]() for label in VARIANTS}
    for budget in BUDGETS:
        finals = {label: measured.finals(f"x{budget:g}", label) for label in losses}
        if seeds := sorted(set.intersection(*map(set, finals.values()))):
            for label, values in finals.items():
                losses[label][budget] = [values[seed] for seed in seeds]
    groups = {f"{label} {budget:g}": many for label, each in losses.items() for budget, many in each.items()}
    recipe = (
        Recipe((name, seed, loss) for name, many in groups.items() for seed, loss in enumerate(many))
        if groups
        else None
    )
    sigma, degrees = (recipe.sigma, float(recipe.degrees)) if recipe is not None else (math.nan, 0.0)
    notes = ["Noise: that of these runs, loss = mechanism and budget + seed."]
    if not degrees:
        sigma, degrees = pooled((one.sigma, one.degrees) for one in measured.noises.values())
        notes = ["These runs have one seed each: the noise is that of the recipe, whose rate decays otherwise."]
    base, block = losses["standard"], losses["block"]
    result = trend(block, base, sigma, degrees)
    gaps = {
        budget: Effect(gap, sigma * math.sqrt(1 / len(block[budget]) + 1 / len(base[budget])), degrees)
        for budget, gap in result.gaps.items()
    }
    curves = [LossCurve((budget, statistics.fmean(many)) for budget, many in one.items()) for one in (block, base)]
    rows = []
    for budget, gap in result.gaps.items():
        tokens = round(budget * unit(setting)) * tokens_a_step
        rows.append(
            [
                f"{budget:g}",
                f"{tokens / 1e6:,.1f} M",
                number(statistics.fmean(base[budget]), 4),
                number(statistics.fmean(block[budget]), 4),
                number(gap, 4, signed=True),
                interval(gaps[budget]) or UNKNOWN,
                times_fewer(saving(*curves, statistics.fmean(block[budget]))),
            ]
        )
    head = ["budget", "tokens", "standard", "block", "gap", "interval", "tokens saved"]
    table = ResultTable(
        "The gap by budget", head, rows, [f"{notes[0]} Sigma {sigma:.4f}." if degrees else NO_NOISE, READ]
    )
    if len(rows) < 2:
        return StudyResult("Too few budgets have finished.", [table])
    courses = {
        "shrinks": "The gap shrinks as training goes on",
        "grows": "The gap grows as training goes on",
        "changes its sign": "The gap changes its sign as training goes on",
        "includes 0": "Of the gap's change as training goes on the interval includes 0",
    }
    margin = f"95 %: {interval(result.slope)}" if result.slope.degrees else "its noise is not known"
    answer = (
        f"{courses[result.answer]}: a doubling of the budget adds {number(result.slope.difference, 4, signed=True)} "
        f"({margin}) to a gap of {number(list(result.gaps.values())[-1], 4, signed=True)} at the longest."
    )
    x = [budget * unit(setting) * tokens_a_step for budget in result.gaps]
    low, high = ([getattr(one, side) for one in gaps.values()] if degrees else [] for side in ("low", "high"))
    line = Line("block", x, list(result.gaps.values()), low, high)
    caption = "Held-out loss of Block minus standard at the end of each budget"
    caption += "; band: 95 % interval." if degrees else ". The noise of seeds is not known."
    chart = Curves("budgets", "The gap by budget", caption, TOKENS, DIFFERENCE, {"": [line]}, log_x=True, zero=True)
    values = {
        "gaps": {f"{b:g}": gap for b, gap in result.gaps.items()},
        "slope": or_none(result.slope.difference),
        "answer": result.answer,
    }
    return StudyResult(answer, [table], [chart], values)


STUDY = Design(
    "budgets",
    "Does the gap last as training goes on?",
    "One run a mechanism and seed with a constant rate, whose decays branch off at half, one and two budgets: four "
    "budgets for little more than the longest alone. Each branch is bit for bit a whole run of its length.",
    "torchtitan's run: -0.127 at step 500, -0.066 at step 20,000 (175 M, one run). The paper: Block -0.020 to -0.026 "
    "at five sizes from 38.7 to 119 B tokens.",
    arms,
    analyse,
)
