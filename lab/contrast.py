"""Compare the variants of an arm with its baseline by the rule of `attnres.stats`: a table, a figure and a sentence."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.figures.comparison import Differences, Interval
from attnres.savings import UNDERSTATED, LossCurve, Saving, saving
from attnres.stats import QUESTIONS, Effect, Recipe, judged, or_none
from attnres.text import UNKNOWN, listed, number
from lab.design import Measured, ResultTable

LARGER = 0.01
"""Fraction of a model's parameters above which those of a mechanism are reported."""
NO_NOISE = "No noise is known: one run each, and python -m lab noise was not run for this recipe."


def noise_note(recipe: Recipe | None) -> str:
    """Return the sentence under a table about the noise between runs of one mechanism."""
    if recipe is None or not recipe.degrees:
        return NO_NOISE
    return (
        f"Loss = mechanism + seed over {sum(recipe.counts.values())} runs: sigma {recipe.sigma:.4f} with "
        f"{recipe.degrees} degree{'s' * (recipe.degrees != 1)} of freedom."
    )


def interval(effect: Effect) -> str:
    """Format the interval of a difference; empty if the noise is unknown."""
    if not effect.margin >= 0:
        return ""
    return " to ".join(number(value, 4, signed=True) for value in (effect.low, effect.high))


def times_fewer(saved: Saving | None, ratio: float = 1.0) -> str:
    """Format the tokens saved, or with `ratio` (the cost of a token relative to the baseline's) the compute or time
    saved; marked if read from a fit."""
    value = math.nan if saved is None else saved.of_compute(ratio)
    if saved is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.2f}×{' by a fit' * saved.extrapolated}"


def ratio_interval(effect: Effect) -> str:
    """Format the interval of a ratio whose logarithm has this effect; empty if seeds vary too much for it to say
    anything."""
    return f"{math.exp(effect.low):.2g} to {math.exp(effect.high):.2g}" if effect.margin < 10 else ""


@dataclass(frozen=True)
class Against:
    """One variant against the baseline.

    Attributes:
        mean: mean of its runs, without the seed effect. runs: their number. effect: its mean minus the baseline's.
        published: the published difference; NaN without one.
        lucky: whether more of the better one's runs diverged, so that the remaining runs are a biased sample.
        saved: tokens saved relative to the baseline; None without a loss curve. compute, time: cost of a token relative
            to the baseline's.
    """

    label: str
    mean: float
    runs: int
    effect: Effect
    published: float = math.nan
    lucky: bool = False
    saved: Saving | None = None
    compute: float = math.nan
    time: float = math.nan

    @property
    def excludes_0(self) -> bool:
        return self.effect.excludes() and not self.lucky

    @property
    def words(self) -> str:
        """Return in words which values the interval excludes."""
        if not self.effect.degrees:
            return "no noise known"
        if self.lucky:
            return "others diverged"
        said = f"{'excludes' if self.excludes_0 else 'includes'} 0"
        if not math.isnan(self.published):
            apart = "excludes" if self.effect.excludes(self.published) else "includes"
            said += f", {apart} the published {number(self.published, 3, signed=True)}"
        return said


@dataclass(frozen=True)
class Contrast:
    """All variants of an arm compared with one of them.

    Attributes:
        recipe: the fit of all runs that show the noise; None if nothing has finished.
        comparisons: planned number of comparisons, finished or not.
        diverged: number of diverged seeds by label. by_lengths: whether tokens saved come from runs with complete
            schedules.
        shares: the residual's parameters relative to the rest of the model, by label, for trained models.
    """

    baseline: str
    recipe: Recipe | None
    comparisons: int
    others: list[Against]
    diverged: Mapping[str, int]
    by_lengths: bool
    shares: Mapping[str, float]
    quantity: str = "loss"

    @property
    def base(self) -> float:
        return math.nan if self.recipe is None else self.recipe.means.get(self.baseline, math.nan)

    def sentence(self) -> str:
        """Return one sentence that says which intervals exclude 0."""
        seeds = [f"{label} ({count} seed{'s' * (count > 1)})" for label, count in self.diverged.items()]
        if not self.others or self.recipe is None:
            return f"Nothing can be compared{f'; diverged: {listed(seeds)}' if seeds else ' yet'}."
        if not self.recipe.degrees:
            return (
                f"No interval is known: with one seed each and no study of noise, no difference to {self.baseline} "
                f"can be told from chance{f'; diverged: {listed(seeds)}' if seeds else ''}."
            )
        parts = []
        for where, sign in (("below", -1), ("above", 1)):
            clear = [variant for variant in self.others if variant.excludes_0 and sign * variant.effect.difference > 0]
            clear.sort(key=lambda variant: -abs(variant.effect.difference))
            if clear:
                sizes = [f"{variant.label} (by {number(abs(variant.effect.difference), 4)})" for variant in clear]
                parts.append(f"{where} {self.baseline}: {listed(sizes)}")
        if rest := [variant.label for variant in self.others if not variant.excludes_0]:
            parts.append(f"the interval includes 0: {listed(rest)}")
        if seeds:
            parts.append(f"diverged: {listed(seeds)}")
        sentence = "; ".join(parts)
        of = f" of {self.comparisons}" * (self.comparisons > len(self.others))
        noise = f"sigma {self.recipe.sigma:.4f} with {self.recipe.degrees} degrees of freedom"
        return f"{sentence[0].upper()}{sentence[1:]} ({noise}, {len(self.others)}{of} compared)."

    def table(self, title: str, published: Mapping[str, str] | None = None) -> ResultTable:
        """Return a table with a row for each variant; `published`: text about published differences."""
        larger = any(share > LARGER for share in self.shares.values())
        saves = any(one.saved is not None for one in self.others)
        timed = any(not math.isnan(one.time) for one in self.others)
        more = ["parameters"] * larger + ["tokens saved", "compute saved"] * saves + ["time saved"] * (saves and timed)
        head = ["variant", self.quantity, "runs", "difference", "interval", "which", *more]
        head += ["published"] * (published is not None)
        rows = []
        for one in [None, *self.others]:
            label = self.baseline if one is None else one.label
            if one is None:
                count = 0 if self.recipe is None else self.recipe.counts.get(label, 0)
                row = [label, number(self.base, 4), str(count), "", "", "baseline"]
            else:
                difference = number(one.effect.difference, 4, signed=True)
                row = [label, number(one.mean, 4), str(one.runs), difference, interval(one.effect), one.words]
            if larger:
                share = self.shares.get(label, math.nan)
                row.append(UNKNOWN if math.isnan(share) else f"{number(100 * share, 1, signed=True)} %" * bool(share))
            ratios = [1.0, *([] if one is None else [one.compute]), *([one.time] if one is not None and timed else [])]
            if saves:
                row += [""] * (2 + timed) if one is None else [times_fewer(one.saved, ratio) for ratio in ratios]
            rows.append([*row, *([published.get(label, "")] if published is not None else [])])
        for label, count in self.diverged.items():
            rows.append([label, "diverged", str(count), *[""] * (len(head) - 3)])
        return ResultTable(title, head, rows, self._notes(larger, saves, timed))

    def _notes(self, larger: bool, saves: bool, timed: bool) -> list[str]:
        notes = [noise_note(self.recipe)]
        if self.recipe is not None and self.recipe.degrees:
            notes[0] += (
                f" Intervals by Student's t: questions that were written down beforehand at 95 %, all others of "
                f"{self.comparisons} comparisons together by Holm."
            )
            if self.recipe.p_equal < 0.05:
                notes[0] += " Variances differ (Bartlett): each mechanism has its own, and Welch's degrees."
        if larger:
            notes.append(
                "Parameters: how many more a mechanism has than the model without it. A larger model is better by "
                "itself, and nothing here is corrected for that."
            )
        if saves:
            read = (
                "the standard model's losses after runs of several lengths (python -m lab exchange)."
                if self.by_lengths
                else f"the loss curves of these runs. {UNDERSTATED}"
            )
            notes.append(
                f"Tokens saved: the tokens that {self.baseline} needs to reach a variant's loss, divided by the "
                f"variant's own; above 1 the variant saves. They are read off {read} "
                f"Compute{' and time' * timed} saved: the same ratio in FLOPs{' and in the time of steps' * timed}."
            )
        return notes

    def chart(self, name: str, title: str) -> Differences:
        """Return a chart of the differences with their intervals."""
        rows = [Interval(one.label, one.effect.difference, one.effect.margin, one.excludes_0) for one in self.others]
        caption = f"Held-out loss minus that of {self.baseline}, nats per token: left of the line is lower."
        return Differences(name, title, caption, "difference, nats per token", rows)

    def values(self) -> dict[str, Any]:
        """Return plain numbers for result.json."""
        known = self.recipe
        return {
            "baseline": self.baseline,
            "base": or_none(self.base),
            "sigma": None if known is None else or_none(known.sigma),
            "degrees": 0 if known is None else known.degrees,
            "variants": {one.label: _values(one) for one in self.others},
        }


def _values(one: Against) -> dict[str, Any]:
    effect = one.effect
    values: dict[str, Any] = {
        "loss": or_none(one.mean),
        "runs": one.runs,
        "difference": or_none(effect.difference),
        "low": or_none(effect.low),
        "high": or_none(effect.high),
        "level": effect.level,
        "excludes_0": one.excludes_0,
    }
    if not math.isnan(one.published):
        values |= {"published": one.published, "excludes_published": effect.excludes(one.published)}
    if one.saved is not None:
        values["tokens_saved"] = or_none(one.saved.tokens)
        values["compute_saved"] = or_none(one.saved.of_compute(one.compute))
        values["extrapolated"] = one.saved.extrapolated
    return values


def contrast(
    measured: Measured,
    arm: str,
    baseline: str,
    labels: Sequence[str] | None = None,
    *,
    quantity: str = "loss",
    comparisons: int = 0,
    floor: float = 0.0,
    published: Mapping[str, float] | None = None,
) -> Contrast:
    """Compare the finished variants of an arm with the baseline.

    Args:
        quantity: the quantity to compare, at the last step.
        comparisons: total number of comparisons; by default all requested variants.
        floor: lower bound of sigma.
        published: published differences to this baseline, by label.
    """
    recipe = measured.recipe_of(arm, quantity, floor)
    names = [label for label in labels or measured.labels(arm) if label != baseline]
    asked = [label for label in labels or measured.asked_for(arm) if label != baseline]
    comparisons = comparisons or max(1, len(asked), len(names))
    diverged = {label: len(seeds) for label in (baseline, *names) if (seeds := measured.diverged(arm, label))}
    known = [] if recipe is None or baseline not in recipe.names else [one for one in names if one in recipe.names]
    planned = [measured.at_recipe(arm, quantity) and (label, baseline) in QUESTIONS for label in known]
    effects = [recipe.effect(label, baseline) for label in known] if recipe is not None else []
    effects = judged(effects, planned, comparisons - sum(planned))
    # The curve belongs to the recipe's learning rates.
    curve = measured.curve if measured.at_recipe(arm, quantity) and "-lr" not in baseline else {}
    lengths = LossCurve(curve.items())
    has_curve = len(lengths.losses) > 1
    base_curve, flops = _curve(measured, arm, baseline), measured.flops(arm, baseline)
    times = {one: measured.step_times[arm, one] for one in (baseline, *names) if (arm, one) in measured.step_times}
    others = []
    for label, effect in zip(known, effects, strict=True):
        assert recipe is not None
        lost = diverged.get(label, 0) - diverged.get(baseline, 0)
        mean, saved = recipe.means[label], None
        if quantity == "loss" and has_curve:
            own, other = (lengths.tokens(loss) for loss in (mean, recipe.means[baseline]))
            saved = Saving(own.tokens / other.tokens, own.extrapolated or other.extrapolated, mean)
        elif quantity == "loss" and len(base_curve.losses) > 1:
            saved = saving(_curve(measured, arm, label), base_curve)
        # Round by round, because the machine's speed changes between rounds.
        rounds = zip(times[label], times[baseline]) if label in times and baseline in times else ()
        pairs = [mine / theirs for mine, theirs in rounds]
        against = Against(
            label,
            mean,
            recipe.counts[label],
            effect,
            (published or {}).get(label, math.nan),
            # The remaining runs are those that happened not to diverge.
            (lost > 0 and effect.difference < 0) or (lost < 0 and effect.difference > 0),
            saved,
            measured.flops(arm, label) / flops if flops else math.nan,
            statistics.median(pairs) if pairs else math.nan,
        )
        others.append(against)
    shares = {}
    for label in (baseline, *names):  # the residual's parameters relative to those of the model without them
        own, every = (measured.mean(arm, label, name) for name in ("own_parameters", "parameters"))
        shares[label] = own / (every - own)
    return Contrast(baseline, recipe, comparisons, others, diverged, has_curve, shares, quantity)


def _curve(measured: Measured, arm: str, label: str) -> LossCurve:
    """Return the mean loss over seeds at the steps that all seeds have."""
    seeds: dict[int, dict[int, float]] = {}
    for row in measured.of(arm, label):
        seeds.setdefault(row.seed, {})[row.tokens] = row.value
    common = set.intersection(*map(set, seeds.values())) if seeds else set()
    return LossCurve((tokens, statistics.fmean(one[tokens] for one in seeds.values())) for tokens in common)
