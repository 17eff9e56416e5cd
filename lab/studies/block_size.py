"""Loss by block size: the paper's Figure 6."""

from attnres.figures.plot import LOSS
from attnres.stats import ALPHA
from attnres.text import number
from lab.charts import Curves, Line
from lab.contrast import contrast
from lab.design import Arm, Design, Measured, Setting, StudyResult


def sizes(setting: Setting) -> list[int]:
    """Return the divisors of the number of sublayers, except the whole network as one block."""
    sublayers = 2 * setting.preset.depth
    return [size for size in range(1, sublayers) if sublayers % size == 0]


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request the standard model, and Block at each size; size one is Full."""
    variants = ["standard", *(f"block:block_size={size}" for size in sizes(setting))]
    return [setting.arm("sizes", variants, of=setting.config())]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report the loss by block size, and whether the interval of the two furthest apart excludes 0."""
    contrasts = contrast(measured, "sizes", "standard")
    rows = {variant.label: variant for variant in contrasts.others}
    points = [(size, rows[f"block-block_size{size}"]) for size in sizes(setting) if f"block-block_size{size}" in rows]
    if not points:
        return StudyResult("Nothing has finished yet.")
    means = [variant.mean for _, variant in points]
    best, worst = points[means.index(min(means))], points[means.index(max(means))]
    assert contrasts.recipe is not None
    count = len(sizes(setting)) * (len(sizes(setting)) - 1) // 2
    # The pair with the largest difference.
    effect = contrasts.recipe.effect(worst[1].label, best[1].label, ALPHA / max(1, count))
    spread = number(max(means) - min(means), 4)
    tell = "excludes 0" if effect.excludes() else "includes 0"
    answer = (
        f"{contrasts.sentence()} Of the two sizes furthest apart, S = {best[0]} and {worst[0]} (by {spread}), the "
        "interval "
        f"{tell}; lowest: S = {best[0]}."
    )
    error = [
        contrasts.recipe.sd(variant.label) / variant.runs**0.5 if contrasts.recipe.degrees else 0.0
        for _, variant in points
    ]
    low, high = [m - 2 * e for m, e in zip(means, error)], [m + 2 * e for m, e in zip(means, error)]
    x = [size for size, _ in points]
    lines = [Line("block", x, means, low, high), Line("standard", [x[0], x[-1]], [contrasts.base] * 2, dashed=True)]
    caption = "Held-out loss by sublayers in a block (1 is Full); band: two standard errors of a mean."
    chart = Curves("block-size", "Block size", caption, "S, sublayers", LOSS, {"": lines}, log_x=True)
    return StudyResult(
        answer, [contrasts.table("Loss by block size")], [chart], {"sizes": contrasts.values(), "best": best[0]}
    )


STUDY = Design(
    "block-size",
    "How large may a block be?",
    "Block with every size that divides the network, beside the standard model.",
    "arXiv 2603.15031, Figure 6, sweeps S from 1 to 32; Full (S = 1) 1.737, S = 4 1.746, baseline 1.766. torchtitan "
    "(12 layers): 3.655, 3.619, 3.623 for 3, 6 and 12 blocks.",
    arms,
    analyse,
)
