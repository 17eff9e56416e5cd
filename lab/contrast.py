"""Variants of one arm against its baseline: a table, a figure and a sentence that says no more than noise allows."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.figures.chart import Differences
from attnres.stats import or_none
from attnres.text import UNKNOWN, listed, number
from lab.analyses.exchange import Exchange, exchange
from lab.analyses.noise import Noise, Spread, Verdict
from lab.design import Measured, Table

LARGER = 0.01
"""Share of a model's parameters above which those of a mechanism are said."""


@dataclass(frozen=True)
class Against:
    """One variant against the baseline, over the seeds that both have.

    Attributes:
        mean: of the baseline with the difference added, so that all are of the baseline's seeds.
        error: standard error of the differences seed by seed; NaN of one.
        noise: by which it was judged. threshold: what the difference had to exceed.
    """

    label: str
    mean: float
    seeds: int
    difference: float
    error: float
    noise: Noise
    threshold: float
    verdict: Verdict


@dataclass(frozen=True)
class Contrast:
    """All variants of an arm against one of them.

    Attributes:
        spread: the noise that they have in common, and that of those which vary more.
        comparisons: how many were to be compared, finished or not.
        diverged: of how many seeds, by label. curve: the standard model's losses by steps, in the recipe's arms.
        ratios: time of a step over the baseline's, where that was measured.
        shares: of the parameters that the residual itself has, by label; of trained models.
    """

    baseline: str
    base: float
    base_seeds: int
    spread: Spread
    comparisons: int
    others: list[Against]
    diverged: Mapping[str, int]
    curve: Mapping[int, float]
    ratios: Mapping[str, float]
    shares: Mapping[str, float]
    quantity: str = "loss"

    @property
    def noise(self) -> Noise:
        return self.spread.shared

    def verdicts(self, which: Verdict) -> list[str]:
        """Labels with that verdict, the largest difference first."""
        ranked = sorted((one for one in self.others if one.verdict == which), key=lambda one: -abs(one.difference))
        return [one.label for one in ranked]

    def sentence(self) -> str:
        """What may be said, in one sentence."""
        seeds = [f"{label} ({count} seed{'s' * (count > 1)})" for label, count in self.diverged.items()]
        if not self.others:
            return f"Nothing can be compared{f'; diverged: {listed(seeds)}' if seeds else ' yet'}."
        if self.noise.degrees < 1:
            return (
                f"Nothing is decided: with one seed each and no study of noise, no difference to {self.baseline} "
                f"can be told from chance{f'; diverged: {listed(seeds)}' if seeds else ''}."
            )
        sizes = {one.label: number(abs(one.difference), 4) for one in self.others}
        parts = [
            f"{verb} {self.baseline}: {listed([f'{label} (by {sizes[label]})' for label in labels])}"
            for verb, which in (("better than", "better"), ("worse than", "worse"))
            if (labels := self.verdicts(which))
        ]
        if open_ones := self.verdicts("undecided"):
            parts.append(f"not to be told from {self.baseline}: {listed(open_ones)}")
        if seeds:
            parts.append(f"diverged: {listed(seeds)}")
        sentence = "; ".join(parts)
        of = f" of {self.comparisons}" * (self.comparisons > len(self.others))
        return f"{sentence[0].upper()}{sentence[1:]} (noise: {self.noise}, {len(self.others)}{of} compared)."

    def table(self, title: str, published: Mapping[str, str] | None = None) -> Table:
        """A row a variant; `published`: what others have for it."""
        head = ["variant", self.quantity, "seeds", "difference", "needed", "verdict"]
        larger = any(share > LARGER for share in self.shares.values())
        head += ["parameters"] * larger
        rate = exchange(list(self.curve), list(self.curve.values())) if len(self.curve) > 1 else None
        timed = rate is not None and len(self.ratios) > 1
        head += ["steps saved"] * (rate is not None) + ["time saved"] * timed + ["published"] * (published is not None)
        rows = []
        base = [self.baseline, number(self.base, 4), str(self.base_seeds), "", "", "baseline"]
        for one in [None, *self.others]:
            label = self.baseline if one is None else one.label
            row = base if one is None else _cells(one)
            if larger:
                row = [*row, _larger(self.shares.get(label, math.nan))]
            if rate is not None:
                row = [*row, "" if one is None else self._saved(one, rate)]
            if rate is not None and timed:
                row = [*row, "" if one is None else self._saved(one, rate, self.ratios.get(label, math.nan))]
            rows.append([*row, *([published.get(label, "")] if published is not None else [])])
        for label, count in self.diverged.items():
            blank = [""] * (len(head) - 3)
            rows.append([label, "diverged", str(count), *blank])
        notes = [self.noise.note]
        if self.noise.degrees:
            counts = sorted({one.seeds for one in self.others} or {1})
            least = listed(
                [
                    f"with {n} seed{'s' * (n > 1)} a true one of {self.noise.detectable(n, n, self.comparisons):.4f}"
                    for n in counts
                ]
            )
            notes[0] += (
                f" A difference has to exceed max(3, Student's t at 5 % over {self.comparisons} comparisons) standard "
                f"errors; {least} would be seen in four of five such studies."
            )
        notes += [f"{label} varies more than the others and is judged by its own: {own}." for label, own in self._own()]
        notes.append("Differences are over the seeds that both have; ± is the standard error of them seed by seed.")
        if any(one.seeds != self.base_seeds for one in self.others):
            notes.append(
                f"With fewer seeds than {self.baseline} has, what stands under {self.quantity} is its mean and that "
                "difference."
            )
        if larger:
            notes.append(
                "Parameters: how many more a mechanism has than the model without it. A larger model is better by "
                "itself, and nothing here is corrected for that."
            )
        if rate is not None:
            notes.append(
                f"Steps saved: how many fewer than {self.baseline} it needs to be as good, by the standard model's own "
                "losses at several lengths (python -m lab exchange), none where nothing is decided; ± is the standard "
                "error by the noise of losses alone."
                + " Time: with the time of a step, taken in turn, whose own error is not in it."
                * timed
            )
        return Table(title, head, rows, notes)

    def _own(self) -> list[tuple[str, Noise]]:
        labels = [self.baseline, *(one.label for one in self.others)]
        return [(label, self.spread.own[label]) for label in labels if label in self.spread.own]

    def _saved(self, one: Against, rate: Exchange, ratio: float = 1.0) -> str:
        """What a decided difference is worth, with its standard error by the noise of losses; a bound where it lies
        beyond the lengths that were trained."""
        if one.verdict == "undecided" or math.isnan(ratio):
            return UNKNOWN
        base, loss = rate.within(self.base), rate.within(one.mean)
        saved = rate.saved(loss, base, ratio)
        if math.isnan(saved) or base != self.base:
            return UNKNOWN
        if loss != one.mean:
            return f"{'>' if loss > one.mean else '<'} {number(100 * saved, 0)} %"
        chance = one.noise.error(one.seeds, one.seeds)
        less, more = (rate.saved(loss + side * chance, base, ratio) for side in (1, -1))
        return f"{number(100 * saved, 0)} ± {number(50 * (more - less), 0)} %"

    def chart(self, name: str, title: str) -> Differences:
        """Differences with their standard errors over the band of the threshold."""
        rows = [
            (one.label, one.difference, one.noise.error(one.seeds, one.seeds) if one.noise.degrees else math.nan)
            for one in self.others
        ]
        caption = (
            f"Held-out loss minus that of {self.baseline}, nats per token. Grey: what a "
            "verdict has to exceed (to the edge: more than is shown). Smaller is better."
        )
        threshold = [one.threshold for one in self.others]
        return Differences(name, title, caption, "difference, nats per token", rows, threshold)

    def values(self) -> dict[str, Any]:
        """Plain numbers for result.json."""
        return {
            "baseline": self.baseline,
            "base": or_none(self.base),
            "sigma": or_none(self.noise.sigma),
            "degrees": self.noise.degrees,
            "variants": {
                one.label: {
                    "loss": or_none(one.mean),
                    "seeds": one.seeds,
                    "difference": or_none(one.difference),
                    "error": or_none(one.error),
                    "needed": or_none(one.threshold),
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
    comparisons: int = 0,
    floor: float = 0.0,
) -> Contrast:
    """Hold the finished variants of an arm against the baseline; those that share no seed with it are left out.

    Args:
        quantity: of the last step; accuracies are `higher_is_better`.
        comparisons: how many are made in all; by default all variants that were asked for.
        floor: sigma is no smaller.
    """
    sign = -1.0 if higher_is_better else 1.0
    base = measured.finals(arm, baseline, quantity)
    names = [label for label in labels or measured.labels(arm) if label != baseline]
    mean = statistics.fmean(base.values()) if base else math.nan
    asked = [label for label in labels or measured.asked_for(arm) if label != baseline]
    comparisons = comparisons or max(1, len(asked), len(names))
    diverged = {label: len(seeds) for label in (baseline, *names) if (seeds := measured.diverged(arm, label))}
    spread, others = measured.spread(arm, quantity, floor), []
    for label in names:
        values = measured.finals(arm, label, quantity)
        gaps = [value - base[seed] for seed, value in values.items() if seed in base]
        if not gaps:
            continue
        difference, n = statistics.fmean(gaps), len(gaps)
        error = statistics.stdev(gaps) / math.sqrt(n) if n > 1 else math.nan
        noise = spread.between(label, n, baseline, n)
        threshold = noise.threshold(n, n, comparisons)
        verdict = noise.verdict(sign * difference, n, n, comparisons)
        lost = diverged.get(label, 0) - diverged.get(baseline, 0)
        if (verdict == "better" and lost > 0) or (verdict == "worse" and lost < 0):
            verdict = "undecided"  # those that are left are the lucky ones
        others.append(Against(label, mean + difference, n, difference, error, noise, threshold, verdict))
    has_own_rate = "-lr" in baseline  # where the curve is of the recipe's
    curve = measured.curve if measured.at_recipe(arm, quantity) and not has_own_rate else {}
    times = {one: measured.step_times[arm, one] for one in (baseline, *names) if (arm, one) in measured.step_times}
    # Round by round: the machine's speed changes, and what is taken in one turn has it in common.
    ratios = {
        label: statistics.median(a / b for a, b in zip(each, times[baseline]))
        for label, each in times.items()
        if baseline in times
    }
    shares = {label: _own_share(measured, arm, label) for label in (baseline, *names)}
    return Contrast(baseline, mean, len(base), spread, comparisons, others, diverged, curve, ratios, shares, quantity)


def _own_share(measured: Measured, arm: str, label: str) -> float:
    """The residual's parameters over those of the model without them; NaN where nothing was trained."""
    own, every = (measured.mean(arm, label, name) for name in ("own_parameters", "parameters"))
    return own / (every - own)


def _larger(share: float) -> str:
    return UNKNOWN if math.isnan(share) else f"{number(100 * share, 1, signed=True)} %" if share else ""


def _cells(one: Against) -> list[str]:
    needed = number(one.threshold, 4) if math.isfinite(one.threshold) else UNKNOWN
    error = f" ± {number(one.error, 4)}" if math.isfinite(one.error) else ""
    difference = f"{number(one.difference, 4, signed=True)}{error}"
    return [one.label, number(one.mean, 4), str(one.seeds), difference, needed, one.verdict]
