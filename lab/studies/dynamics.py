"""Magnitudes and gradients by depth: the paper's Figure 5, also for many narrow layers."""

import math
import statistics
from dataclasses import dataclass

from attnres.stats import Effect, Recipe, judged
from attnres.text import UNKNOWN, number
from lab.charts import Curves, Line
from lab.contrast import ratio_interval
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult

QUANTITIES = {"output_rms": "RMS of a sublayer's output", "grad_rms": "RMS of the gradient that reaches it"}
VARIANTS = ("standard", "rescaled", "block", "full")


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request the recipe, and a model of many narrow layers."""
    deep = setting.sized(setting.preset.deep, steps=setting.preset.many)
    depth = tuple(QUANTITIES)
    seeds = range(min(2, setting.seeds))
    return [
        setting.arm("recipe", VARIANTS, seeds, of=setting.config(), depth=depth),
        setting.arm("deep", VARIANTS, seeds, of=deep, depth=depth),
    ]


def profiles(measured: Measured, arm: str, label: str, quantity: str) -> dict[int, list[float]]:
    """Return the quantity by sublayer at the last step, by seed."""
    values: dict[int, dict[int, float]] = {}
    for row in measured.rows:
        name, _, place = row.quantity.partition("/")
        if (row.arm, row.label, name) == (arm, label, quantity):
            values.setdefault(row.seed, {})[int(place)] = row.value
    return {seed: [each[place] for place in sorted(each)] for seed, each in values.items()}


def growth(values: list[float]) -> float:
    """Return the logarithm of the ratio of the last quarter's median to the first's; NaN for fewer than four values or
    zeros.

    Medians, because the first sublayer may be far from all others and would dominate a mean.
    """
    quarter = len(values) // 4
    if not quarter or min(values) <= 0:
        return math.nan
    first, last = values[:quarter], values[-quarter:]
    return math.log(statistics.median(last) / statistics.median(first))


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report how much outputs grow with depth, and how uneven gradients are over it, relative to the standard model."""
    comparisons = len(QUANTITIES) * sum(len(measured.asked_for(arm)) - 1 for arm in measured.planned)
    rows, charts, values, sentences = [], [], {}, []
    for quantity, name in QUANTITIES.items():
        panels = {}
        for arm in measured.planned:
            each = {label: profiles(measured, arm, label, quantity) for label in measured.labels(arm)}
            panels[arm] = [
                Line(label, range(len(mean)), mean)
                for label, many in each.items()
                if (mean := [statistics.fmean(place) for place in zip(*many.values(), strict=True)])
            ]
            ratios = _beside_standard(each, comparisons)
            for label, one in ratios.items():
                bounds = (one.effect and ratio_interval(one.effect)) or UNKNOWN
                rows.append([arm, label, name, number(one.ratio, 2), bounds, one.words, str(one.seeds)])
                values[f"{arm}/{label}/{quantity}"] = {"ratio": one.ratio, "beside_standard": one.words}
            if ratios:
                said = ", ".join(f"{label} {one}" for label, one in ratios.items())
                sentences.append(f"{arm}, {name}: {said}.")
        if panels := {arm: lines for arm, lines in panels.items() if lines}:
            caption = f"{name} at the last step, by sublayer; mean over seeds."
            charts.append(Curves(quantity.replace("_", "-"), name, caption, "sublayer", name, panels, log_y=True))
    head = ["arm", "variant", "quantity", "ratio", "over standard's", "beside standard", "seeds"]
    note = (
        "Median of the last quarter of the depth over that of the first. Over standard's: 95 % interval of the ratio "
        f"of both, by the logarithms over seeds, {comparisons} comparisons together by Holm; none of one seed."
    )
    table = ResultTable("Last quarter of the depth over the first", head, rows, [note])
    said = "From the first quarter of the depth to the last, times: " + " ".join(sentences)
    return StudyResult(said if sentences else "Nothing has finished yet.", [table], charts, values)


@dataclass(frozen=True)
class RatioByDepth:
    """Growth of a quantity with depth, over a mechanism's seeds.

    Attributes:
        effect: the logarithm of the ratio to standard's growth; None for standard itself.
    """

    ratio: float
    effect: Effect | None
    seeds: int

    @property
    def words(self) -> str:
        if self.effect is None:
            return ""
        return ("less" if self.effect.difference < 0 else "more") if self.effect.excludes() else "includes 1"

    def __str__(self) -> str:
        return f"{number(self.ratio, 2)}{f' ({self.words})' * bool(self.words)}"


def _beside_standard(each: dict[str, dict[int, list[float]]], comparisons: int) -> dict[str, RatioByDepth]:
    """Return the growth of each of an arm's mechanisms, over the seeds for which it is known."""
    logs = {
        label: {seed: one for seed, many in seeds.items() if math.isfinite(one := growth(many))}
        for label, seeds in each.items()
    }
    effects = dict[str, Effect]()
    if logs.get("standard"):
        recipe = Recipe((label, seed, one) for label, known in logs.items() for seed, one in known.items())
        others = [label for label in recipe.names if label != "standard"]
        judgements = judged([recipe.effect(label, "standard") for label in others], [False] * len(others), comparisons)
        effects = dict(zip(others, judgements, strict=True))
    return {
        label: RatioByDepth(math.exp(statistics.fmean(known.values())), effects.get(label), len(known))
        for label, known in logs.items()
        if known
    }


STUDY = Design(
    "dynamics",
    "Do outputs stay of one size along the depth?",
    "Magnitudes of outputs and gradients by sublayer at the end of training, at the recipe and at many narrow layers.",
    "arXiv 2603.15031, Figure 5: outputs of the baseline grow with depth, Block's stay bounded and repeat with the "
    "blocks; its gradients are more even.",
    arms,
    analyse,
)
