"""Magnitudes and gradients by depth: Figure 5, also at many narrow layers."""

import math
import statistics

from attnres.figures.chart import Curves, Line
from attnres.studies.design import Arm, Design, Measured, Result, Setting, Table
from attnres.text import number

QUANTITIES = {"output_rms": "RMS of a sublayer's output", "grad_rms": "RMS of the gradient that reaches it"}
VARIANTS = ("standard", "block", "full")


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """The recipe, and a model of many narrow layers."""
    deep = setting.sized(setting.preset.deep, steps=setting.preset.many)
    depth = tuple(QUANTITIES)
    seeds = range(min(2, setting.seeds))
    return [
        setting.arm("recipe", VARIANTS, seeds, of=setting.config(), depth=depth),
        setting.arm("deep", VARIANTS, seeds, of=deep, depth=depth),
    ]


def profile(measured: Measured, arm: str, label: str, quantity: str) -> list[float]:
    """The quantity by sublayer at the last step, mean over seeds."""
    values: dict[int, list[float]] = {}
    for row in measured.rows:
        name, _, place = row.quantity.partition("/")
        if (row.arm, row.label, name) == (arm, label, quantity):
            values.setdefault(int(place), []).append(row.value)
    return [statistics.fmean(values[place]) for place in sorted(values)]


def growth(values: list[float]) -> float:
    """Geometric mean of the last quarter over that of the first; NaN of fewer than four or of zeros."""
    quarter = len(values) // 4
    if not quarter or min(values) <= 0:
        return math.nan
    first, last = values[:quarter], values[-quarter:]
    return math.exp(statistics.fmean(map(math.log, last)) - statistics.fmean(map(math.log, first)))


def analyse(setting: Setting, measured: Measured) -> Result:
    """How much outputs grow along the depth, and how unevenly gradients reach it."""
    rows, charts, values, sentences = [], [], {}, []
    for quantity, name in QUANTITIES.items():
        panels = {}
        for arm in measured.planned:
            lines = []
            for label in measured.labels(arm):
                curve = profile(measured, arm, label, quantity)
                if curve:
                    lines.append(Line(label, range(len(curve)), curve))
                    ratio = growth(curve)
                    rows.append([arm, label, name, number(ratio, 2)])
                    values[f"{arm}/{label}/{quantity}"] = ratio if math.isfinite(ratio) else None
            if lines:
                panels[arm] = lines
        if panels:
            caption = f"{name} at the last step, by sublayer; mean over seeds."
            charts.append(Curves(quantity.replace("_", "-"), name, caption, "sublayer", name, panels, log_y=True))
    for arm in measured.planned:
        ratios = {label: values.get(f"{arm}/{label}/output_rms") for label in VARIANTS}
        if all(ratios.values()):
            numbers = ", ".join(f"{label} {number(ratio, 2)}" for label, ratio in ratios.items())
            sentences.append(f"{arm}: outputs grow from the first to the last quarter of the depth by {numbers} times.")
    table = Table("Last quarter of the depth over the first", ["arm", "variant", "quantity", "ratio"], rows)
    return Result(" ".join(sentences) or "Nothing has finished yet.", [table], charts, values)


STUDY = Design(
    "dynamics",
    "Do outputs stay of one size along the depth?",
    "Magnitudes of outputs and gradients by sublayer at the end of training, at the recipe and at many narrow layers.",
    "arXiv 2603.15031, Figure 5: outputs of the baseline grow with depth, Block's stay bounded and repeat with the "
    "blocks; its gradients are more even.",
    arms,
    analyse,
)
