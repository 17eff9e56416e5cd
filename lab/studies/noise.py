"""How far runs of the standard model fall apart that differ in their seed alone."""

import statistics

from attnres.figures.chart import Curves, Line
from attnres.text import number
from lab.analyses.noise import pooled
from lab.design import Arm, Design, Measured, Result, Setting, Table

ENOUGH = 5
"""Seeds below which no correlation over them is given."""


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """The standard model with the preset's number of seeds, at both lengths that studies have; its control with two."""
    preset, recipe = setting.preset, setting.config()
    seeds = range(max(preset.floor, setting.seeds))
    parts = [setting.arm("recipe", ["standard"], seeds, of=recipe)]
    if preset.many != preset.steps:
        parts.append(setting.arm("many", ["standard"], seeds, of=setting.config(steps=preset.many)))
    return [*parts, setting.arm("control", ["rescaled"], range(2), of=recipe)]


def analyse(setting: Setting, measured: Measured) -> Result:
    """sigma over training and at the end of each length, and whether the control lies inside it."""
    rows, by_steps, lines, when = [], {}, [], []
    for arm in ("recipe", "many"):
        losses = measured.finals(arm, "standard")
        if not losses:
            continue
        noise = pooled([list(losses.values())], "seeds of the standard model")
        steps, mean = measured.steps(arm, "standard"), statistics.fmean(losses.values())
        if noise.degrees:
            by_steps[steps] = {"sigma": noise.sigma, "degrees": noise.degrees}
        needed = number(noise.threshold(3, 3), 4) if noise.degrees else "–"
        rows.append([f"{steps:,}", str(len(losses)), number(mean, 4), number(noise.sigma, 4), needed])
        spread = {
            step: [row.value for row in measured.of(arm, "standard") if row.step == step]
            for step in sorted({row.step for row in measured.of(arm, "standard")})
        }
        curve = [(step, pooled([values]).sigma) for step, values in spread.items() if len(values) > 1]
        if curve:
            lines.append(Line.through(f"{steps:,} steps", curve))
        when += [[f"{steps:,}", *row] for row in _when(spread)]
    control, base = measured.finals("control", "rescaled"), measured.finals("recipe", "standard")
    sentence, inside = "The control was not run.", None
    if control and base:
        noise = pooled([list(base.values())])
        gap = statistics.fmean(control.values()) - statistics.fmean(base.values())
        inside = noise.verdict(gap, len(control), len(base)) == "undecided" if noise.degrees else None
        where = {True: "inside the noise", False: "OUTSIDE the noise", None: "not to be judged: one seed"}[inside]
        limit = f", where {number(noise.threshold(len(control), len(base)), 4)} would not be" if noise.degrees else ""
        gaps = f"{number(gap, 4, signed=True)} with {len(control)} seeds"
        sentence = f"rescaled, the same function, is {where} ({gaps}{limit})."
    table = Table("Noise of one run", ["steps", "seeds", "mean loss", "sigma", "a win needs (3 seeds against 3)"], rows)
    tables = [table]
    if when:
        note = "Over seeds, with the loss at the end: where it is high, luck has fallen, and only more seeds help."
        head = ["steps", "after", "sigma", "correlation with the end"]
        tables.append(Table("When a seed's luck falls", head, when, [note]))
    known = ", ".join(f"{number(one['sigma'], 4)} at {steps:,} steps" for steps, one in by_steps.items())
    caption = "Standard deviation over seeds of the held-out loss, nats per token."
    chart = Curves("noise", "Noise over training", caption, "step", "sigma (nats)", {"": lines}) if lines else None
    return Result(
        f"Runs of one function scatter with sigma {known}. {sentence}" if known else "Too few seeds have finished.",
        tables,
        [chart] if chart else [],
        {"by_steps": {str(steps): one for steps, one in by_steps.items()}, "control_inside": inside},
    )


def _when(spread: dict[int, list[float]]) -> list[list[str]]:
    """Rows of the step, its sigma and how its losses go with the last ones, seed by seed; none of few seeds."""
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
