"""The best shape at fixed compute: do depth reads favour deeper models (the paper's Figure 7)?"""

import math

from attnres.figures.plot import LOSS
from attnres.text import number
from lab.analyses import optimum, pooled, widened
from lab.charts import Curves, Line
from lab.contrast import NO_NOISE
from lab.cost import flops_a_token, vocabulary_of
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult
from lab.presets import shape

VARIANTS = ("standard", "block")


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request an arm for each depth; all have about the parameters of the recipe's layers, and steps for equal
    FLOPs."""
    preset, recipe = setting.preset, setting.config()
    parameters = preset.layer_parameters
    vocabulary, length = vocabulary_of(recipe), recipe.data.seq_len
    budget = preset.many * flops_a_token(shape(preset.depth, parameters), length, vocabulary)
    parts = []
    for depth in sorted(preset.layers):
        size = shape(depth, parameters)
        steps = max(2, round(budget / flops_a_token(size, length, vocabulary)))
        run = setting.sized(size, steps=steps)
        parts.append(setting.arm(f"layers{depth}", VARIANTS, of=run))
    return parts


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report the minimum of each mechanism's loss over width / depth."""
    parameters = setting.preset.layer_parameters
    ratios, panels, rows = list[float](), {label: list[float]() for label in VARIANTS}, []
    for layers in sorted(setting.preset.layers):
        ratio = shape(layers, parameters)["hidden_size"] / layers
        losses = [measured.mean(f"layers{layers}", label) for label in VARIANTS]
        ratios.append(ratio)
        for label, loss in zip(VARIANTS, losses, strict=True):
            panels[label].append(loss)
        rows.append([str(layers), f"{ratio:.1f}", *(number(loss, 4) for loss in losses)])
    arms_of = [f"layers{layers}" for layers in setting.preset.layers]
    recipes = [one for arm in arms_of if (one := measured.recipe_of(arm)) is not None]
    known, degrees = pooled((one.sigma, one.degrees) for one in recipes)
    table = ResultTable(
        "Loss by shape at equal FLOPs",
        ["layers", "d / layers", *VARIANTS],
        rows,
        [f"Noise: sigma {known:.4f} with {degrees} degrees of freedom." if degrees else NO_NOISE],
    )
    counts = [n for arm in arms_of for label in VARIANTS if (n := len(measured.finals(arm, label)))]
    sigma = widened(known, degrees) / math.sqrt(min(counts)) if degrees else None
    best, sentences = {}, []
    for label, losses in panels.items():
        known = [(ratio, loss) for ratio, loss in zip(ratios, losses) if math.isfinite(loss)]
        if len(known) < 3:
            continue
        best[label] = one = optimum(*zip(*known, strict=True), sigma=sigma)
        bounded = one.inside and math.isfinite(one.low)
        interval = f" (95 %: {number(one.low, 1)} to {number(one.high, 1)})" if bounded else ""
        where = "" if one.inside else ", the edge of the grid, or beyond"
        sentences.append(f"{label} is best at d / layers = {number(one.at, 1)}{interval}{where}.")
    if len(best) == 2:
        base, other = best["standard"], best["block"]
        apart = other.high < base.low or other.low > base.high
        shift = "to deeper models" if other.at < base.at else "to shallower models"
        sentences.append(
            f"The intervals do not overlap: the optimum moves {shift}."
            if apart
            else "The intervals of the two optima overlap."
        )
    lines = [Line(label, ratios, losses) for label, losses in panels.items() if any(map(math.isfinite, losses))]
    caption = "Held-out loss of models of equal FLOPs; small ratios are deep and narrow."
    charts = [Curves("depth-width", "Shape", caption, "d / layers", LOSS, {"": lines}, log_x=True)] if lines else []
    values = {label: {"at": one.at, "inside": one.inside} for label, one in best.items()}
    return StudyResult(" ".join(sentences) or "Too few shapes have finished.", [table], charts, values)


STUDY = Design(
    "depth-width",
    "Do depth reads want deeper models?",
    "Models of equal compute from wide and shallow to narrow and deep, standard and Block, at the recipe's rates, "
    "carried to each width as muP has it, but that heads are not all as wide as the recipe's, which muP asks for. The "
    "compute is the standard model's: Block's reads come on top, more where the model is deep.",
    "arXiv 2603.15031, Figure 7 (6.5e19 FLOPs): baseline best at d / layers = 60 (1.847), Full at 45 (1.802).",
    arms,
    analyse,
)
