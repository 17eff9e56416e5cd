"""The noise between runs of the standard model that differ only in their seed."""

import statistics

from attnres.stats import Recipe
from attnres.text import number
from lab.charts import Curves, Line
from lab.contrast import interval
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult

ENOUGH = 5
"""Fewest seeds for which a correlation over them is reported."""


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request the standard model with the preset's number of seeds, at the two lengths that studies use; its placebo
    control with two."""
    preset, recipe = setting.preset, setting.config()
    seeds = range(max(preset.floor, setting.seeds))
    parts = [setting.arm("recipe", ["standard"], seeds, of=recipe)]
    if preset.many != preset.steps:
        parts.append(setting.arm("many", ["standard"], seeds, of=setting.config(steps=preset.many)))
    return [*parts, setting.arm("control", ["rescaled"], range(2), of=recipe)]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report sigma over training and at the end of each length, and whether the control lies within it."""
    rows, by_steps, lines, when = [], {}, [], []
    control, base = measured.finals("control", "rescaled"), measured.finals("recipe", "standard")
    for arm in ("recipe", "many"):
        losses = measured.finals(arm, "standard")
        if not losses:
            continue
        runs = {"standard": losses, **({"rescaled": control} if arm == "recipe" and control else {})}
        recipe = Recipe(("standard", seed, loss) for seed, loss in losses.items())
        steps, mean = measured.steps(arm, "standard"), statistics.fmean(losses.values())
        if recipe.degrees:
            stored = {label: {str(seed): loss for seed, loss in each.items()} for label, each in runs.items()}
            by_steps[steps] = {"sigma": recipe.sigma, "degrees": recipe.degrees, "runs": stored}
        rows.append([f"{steps:,}", str(len(losses)), number(mean, 4), number(recipe.sigma, 4)])
        spread = {
            step: [row.value for row in measured.of(arm, "standard") if row.step == step]
            for step in sorted({row.step for row in measured.of(arm, "standard")})
        }
        curve = [(step, statistics.stdev(values)) for step, values in spread.items() if len(values) > 1]
        if curve:
            lines.append(Line.through(f"{steps:,} steps", curve))
        when += [[f"{steps:,}", *row] for row in _when(spread)]
    sentence, inside = "The control was not run.", None
    if control and base:
        losses = (("rescaled", control), ("standard", base))
        effect = Recipe((label, seed, loss) for label, each in losses for seed, loss in each.items()).effect(
            "rescaled", "standard"
        )
        inside = not effect.excludes() if effect.degrees else None
        where = {True: "inside the noise", False: "OUTSIDE the noise", None: "not to be judged: one seed"}[inside]
        bounds = f"; 95 %: {interval(effect)}" if effect.degrees else ""
        gap = f"{number(effect.difference, 4, signed=True)} with {len(control)} seeds{bounds}"
        sentence = f"rescaled, the same function, is {where} ({gap})."
    table = ResultTable("Noise of one run", ["steps", "seeds", "mean loss", "sigma"], rows)
    tables = [table]
    if when:
        note = "Over seeds, with the loss at the end: where it is high, luck has fallen, and only more seeds help."
        head = ["steps", "after", "sigma", "correlation with the end"]
        tables.append(ResultTable("When a seed's luck falls", head, when, [note]))
    known = ", ".join(f"{number(one['sigma'], 4)} at {steps:,} steps" for steps, one in by_steps.items())
    caption = "Standard deviation over seeds of the held-out loss, nats per token."
    chart = Curves("noise", "Noise over training", caption, "step", "sigma (nats)", {"": lines}) if lines else None
    return StudyResult(
        f"Runs of one function scatter with sigma {known}. {sentence}" if known else "Too few seeds have finished.",
        tables,
        [chart] if chart else [],
        {"by_steps": {str(steps): one for steps, one in by_steps.items()}, "control_inside": inside},
    )


def _when(spread: dict[int, list[float]]) -> list[list[str]]:
    """Return rows of the step, its sigma, and the correlation of its losses with the final ones over seeds; empty for
    few seeds."""
    end = spread[max(spread)]
    if len(end) < ENOUGH:
        return []
    sigmas = {step: statistics.stdev(values) for step, values in spread.items() if len(values) == len(end)}
    return [
        [f"{step:,}", number(sigma, 4), number(statistics.correlation(spread[step], end), 2)]
        for step, sigma in sigmas.items()
        if sigma > 0 and sigmas[max(spread)] > 0
    ]


STUDY = Design(
    "noise",
    "How far do runs of one function fall apart?",
    "The standard model with many seeds at the recipe, and its control, which is the same function under another name.",
    "modded-nanogpt keeps a sigma of 0.0013 from many runs and asks for 10 to 20; here nobody has one at this size.",
    arms,
    analyse,
)
