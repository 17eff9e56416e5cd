"""Variants of one arm against its baseline: a table, a figure and a sentence that says no more than noise allows."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.figures.chart import Differences
from attnres.studies.analyses.exchange import exchange
from attnres.studies.analyses.noise import Noise, Verdict
from attnres.studies.design import Measured, Table
from attnres.text import UNKNOWN, listed, number


@dataclass(frozen=True)
class Against:
    """One variant against the baseline."""

    label: str
    mean: float
    seeds: int
    difference: float
    threshold: float
    verdict: Verdict


@dataclass(frozen=True)
class Contrast:
    """All variants of an arm against one of them."""

    baseline: str
    base: float
    base_seeds: int
    noise: Noise
    others: list[Against]
    steps: int
    curve: Mapping[int, float]
    ratios: Mapping[str, float]

    def verdicts(self, which: Verdict) -> list[str]:
        """Labels with that verdict, the largest difference first."""
        ranked = sorted((one for one in self.others if one.verdict == which), key=lambda one: -abs(one.difference))
        return [one.label for one in ranked]

    def sentence(self) -> str:
        """What may be said, in one sentence."""
        if not self.others:
            return "Nothing can be compared yet."
        if self.noise.degrees < 1:
            return (
                f"Nothing is decided: with one seed each and no study of noise, no difference to {self.baseline} "
                "can be told from chance."
            )
        sizes = {one.label: number(abs(one.difference), 4) for one in self.others}
        parts = [
            f"{verb} {self.baseline}: {listed([f'{label} (by {sizes[label]})' for label in labels])}"
            for verb, which in (("better than", "better"), ("worse than", "worse"))
            if (labels := self.verdicts(which))
        ]
        if open_ones := self.verdicts("undecided"):
            parts.append(f"not to be told from {self.baseline}: {listed(open_ones)}")
        sentence = "; ".join(parts)
        return f"{sentence[0].upper()}{sentence[1:]} (noise: {self.noise}, {len(self.others)} compared)."

    def table(self, title: str, published: Mapping[str, str] | None = None) -> Table:
        """A row a variant; `published`: what others have for it."""
        head = ["variant", "loss", "seeds", "difference", "needed", "verdict"]
        rate = exchange(list(self.curve), list(self.curve.values())) if len(self.curve) > 1 else None
        timed = rate is not None and bool(self.ratios)
        head += ["steps saved"] * (rate is not None) + ["time saved"] * timed + ["published"] * (published is not None)
        rows = []
        base = [self.baseline, number(self.base, 4), str(self.base_seeds), "", "", "baseline"]
        for one in [None, *self.others]:
            label = self.baseline if one is None else one.label
            row = base if one is None else _cells(one)
            if rate is not None:
                row = [*row, "" if one is None else _percent(rate.saved(one.mean, self.steps))]
            if rate is not None and timed:
                ratio = self.ratios.get(label, math.nan)
                row = [*row, "" if one is None else _percent(rate.saved_time(one.mean, self.steps, ratio))]
            rows.append([*row, *([published.get(label, "")] if published is not None else [])])
        notes = [self.noise.note]
        if self.noise.degrees:
            n = max(one.seeds for one in self.others) if self.others else 1
            least = self.noise.detectable(n, self.base_seeds, max(1, len(self.others)))
            notes[0] += (
                f" A difference has to exceed max(3, Student's t at 5 % over {len(self.others)} comparisons) standard "
                f"errors; a true one of {least:.4f} would be seen in four of five such studies."
            )
        if rate is not None:
            notes.append(
                "Steps and time saved: how much less than the standard model needs to be as good (attnres study "
                "exchange); time by medians of each run's own steps, which other work may have shared the machine with."
            )
        return Table(title, head, rows, notes)

    def chart(self, name: str, title: str) -> Differences:
        """Differences with their standard errors over the band of the threshold."""
        rows = [
            (
                one.label,
                one.difference,
                self.noise.error(one.seeds, self.base_seeds) if self.noise.degrees else math.nan,
            )
            for one in self.others
        ]
        caption = (
            f"Held-out loss minus that of {self.baseline}, nats per token; bars one standard error, grey what a "
            "verdict has to exceed. Smaller is better."
        )
        threshold = [one.threshold for one in self.others]
        return Differences(name, title, caption, "difference, nats per token", rows, threshold)

    def values(self) -> dict[str, Any]:
        """Plain numbers for result.json."""
        return {
            "baseline": self.baseline,
            "base": _plain(self.base),
            "sigma": _plain(self.noise.sigma),
            "degrees": self.noise.degrees,
            "variants": {
                one.label: {
                    "loss": _plain(one.mean),
                    "seeds": one.seeds,
                    "difference": _plain(one.difference),
                    "needed": _plain(one.threshold),
                    "verdict": one.verdict,
                }
                for one in self.others
            },
        }


def contrast(
    measured: Measured,
    arm: str,
    baseline: str,
    labels: Sequence[str] | None = None,
    *,
    quantity: str = "loss",
    higher_is_better: bool = False,
) -> Contrast:
    """Hold the finished variants of an arm against the baseline; those without a value are left out.

    Args:
        quantity: of the last step; accuracies are `higher_is_better`.
    """
    sign = -1.0 if higher_is_better else 1.0
    base = list(measured.finals(arm, baseline, quantity).values())
    names = [label for label in labels or measured.labels(arm) if label != baseline]
    values = {label: list(measured.finals(arm, label, quantity).values()) for label in names}
    values = {label: losses for label, losses in values.items() if losses} if base else {}
    noise = measured.noise(arm, quantity)
    others = []
    for label, losses in values.items():
        difference = statistics.fmean(losses) - statistics.fmean(base)
        sizes = (len(losses), len(base), max(1, len(values)))
        verdict = noise.verdict(sign * difference, *sizes)
        others.append(
            Against(label, statistics.fmean(losses), len(losses), difference, noise.threshold(*sizes), verdict)
        )
    mean = statistics.fmean(base) if base else math.nan
    curve = measured.curve if measured.at_recipe(arm, quantity) else {}
    seconds = {label: measured.step_s.get((arm, label), math.nan) for label in (baseline, *values)}
    ratios = {label: value / seconds[baseline] for label, value in seconds.items() if math.isfinite(value)}
    return Contrast(baseline, mean, len(base), noise, others, measured.steps(arm, baseline), curve, ratios)


def _cells(one: Against) -> list[str]:
    needed = number(one.threshold, 4) if math.isfinite(one.threshold) else UNKNOWN
    return [one.label, number(one.mean, 4), str(one.seeds), number(one.difference, 4, signed=True), needed, one.verdict]


def _percent(share: float) -> str:
    return UNKNOWN if math.isnan(share) else f"{100 * share:.0f} %"


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
