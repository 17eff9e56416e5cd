"""Compute the comparison table: a row for each variant, and the notes under it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnres.device import spread
from attnres.report.runs import Run, Study
from attnres.report.stats import (
    SEEDS_FOR_SEED_ERROR,
    Paired,
    against,
    is_planned,
    kind_name,
    mean_loss,
    strongest_baseline,
    why_unpaired,
)
from attnres.residuals import Traits
from attnres.savings import UNDERSTATED, LossCurve, Saving, saving
from attnres.stats import perplexity
from attnres.text import listed, number

ROUNDS = 5
"""Fewest rounds of an interleaved timing whose medians are shown."""
SPREAD = 1.5
"""Largest ratio of the upper to the lower quartile of step-time ratios for which timings are shown."""


@dataclass(frozen=True)
class VariantRow:
    """The measurements of one variant; NaN or None if unknown."""

    label: str
    runs: list[Run]  # by seed
    counted: list[Run]  # those that means are taken over
    loss: float  # nats per token, mean over seeds
    loss_se: float
    paired: Paired | None  # against the baseline
    tokens_per_s: float
    step_ratio: float  # relative to the plain model's step if that was timed with it, else to the baseline's
    # quartiles of that ratio over the rounds of an interleaved timing
    step_quartiles: tuple[float, float] = (math.nan, math.nan)
    saving: Saving | None = None  # tokens relative to the baseline's, from the loss curves

    @property
    def tokens_saved(self) -> float:
        """Return how many times this row's tokens the baseline needs for the same loss; NaN if unknown."""
        return math.nan if self.saving is None else self.saving.tokens

    @property
    def decided(self) -> bool:
        """Return whether its difference to the baseline is significant, and the row is no placebo control."""
        return self.paired is not None and self.paired.decided and not self.traits.is_chance

    @property
    def residual(self) -> str:
        return self.runs[0].residual

    @property
    def traits(self) -> Traits:
        """Return the traits of its mechanism."""
        return self.runs[0].traits

    @property
    def finished(self) -> int:
        """Return the number of finished runs."""
        return sum(run.finished for run in self.runs)

    @property
    def complete(self) -> bool:
        return self.finished == len(self.runs)

    @property
    def step(self) -> int:
        """Return the last step that every run has reached."""
        return min(run.last_step for run in self.runs)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def flops_per_s(self) -> float:
        """Return the plain model's operations a second, see `attnres.models.step_cost`."""
        return self.tokens_per_s * self.largest("flops_per_token")

    @property
    def mfu(self) -> float:
        """Return `flops_per_s` as a fraction of the device's peak."""
        return self.flops_per_s / self.largest("peak_flops")

    @property
    def start_loss(self) -> float:
        """Return the mean over seeds of the held-out loss before the first step, for runs that start from a trained
        model."""
        first = [next((float(line["loss"]) for line in run.val if line["step"] == 0), math.nan) for run in self.runs]
        return float(np.mean(first))

    def mean(self, key: str) -> float:
        """Return the mean of `key` over the summaries of finished runs; NaN if one has none."""
        return float(np.mean([_known(run, key) for run in self.runs if run.finished] or [math.nan]))

    def largest(self, key: str) -> float:
        """Return the largest value of `key` in the summaries of finished runs."""
        return max((value for run in self.runs if not math.isnan(value := _known(run, key))), default=math.nan)


@dataclass(frozen=True)
class ComparisonTable:
    """Rows in the study's order, the baseline, and the notes under the table."""

    rows: list[VariantRow]
    baseline: str | None
    interleaved: bool  # speeds and step-time ratios come from an interleaved timing, not from separate runs
    notes: list[str]
    doubt: str = ""  # the reason why tokens/s and step times are not shown
    plain_tokens_per_s: float = math.nan  # of the plain Transformers model with the same weights, timed interleaved

    def row(self, label: str) -> VariantRow:
        return next(row for row in self.rows if row.label == label)


def build_table(study: Study) -> ComparisonTable:
    """Compute the rows of a study, unformatted."""
    baseline = strongest_baseline(study)
    interleaved = baseline is not None and not math.isnan(_timed(study, baseline))
    base_time = _median_of(study.counted(baseline), "step_s") if baseline else math.nan
    plain = _seconds((study.speed or {}).get("plain"))
    pairs = against(study, baseline) if baseline else {}
    curves = {label: _curve(study.counted(label)) for label in [*pairs, *([baseline] if pairs and baseline else [])]}
    rows = []
    for label in study.labels:
        runs, counted = study.of(label), study.counted(label)
        if interleaved:
            ratio = _beside(study, label, baseline or "")
            speed = _tokens_a_step(runs[0]) / _timed(study, label)
        else:
            ratio = _median_of(counted, "step_s") / base_time
            speed = _median_of(counted, "tokens_per_s")
        loss = mean_loss(study, label)
        saved = saving(curves[label], curves[baseline]) if baseline and label in pairs else None
        rows.append(
            VariantRow(label, runs, counted, *loss, pairs.get(label), speed, ratio, _quartiles(study, label), saved)
        )
    waiting = [row.label for row in rows if not row.complete]
    doubt = f"{listed(waiting)} not finished" if waiting else _doubt(study, rows) if interleaved else ""
    notes = _notes(study, rows, baseline, interleaved, doubt)
    rate = _tokens_a_step(study.runs[0]) / plain if study.runs else math.nan
    return ComparisonTable(rows, baseline, interleaved, notes, doubt, rate)


# ------------------------------------------------------------------ what a run knows


def _known(run: Run, key: str) -> float:
    value = (run.summary or {}).get(key)
    return math.nan if value is None else float(value)


def _curve(runs: list[Run]) -> LossCurve:
    """Return the mean over runs of the held-out loss at their common steps."""
    losses = [{record["step"]: float(record["loss"]) for record in run.val} for run in runs]
    steps = set.intersection(*map(set, losses))
    return LossCurve((runs[0].tokens_at(step), float(np.mean([one[step] for one in losses]))) for step in steps)


def _median_of(runs: list[Run], key: str) -> float:
    """Return the median over seeds; for an unfinished run, of its training lines so far."""
    values = [_known(run, key) for run in runs]
    for i, run in enumerate(runs):
        lines = [float(record[key]) for record in run.train if record.get(key) is not None]
        if math.isnan(values[i]) and lines:
            values[i] = float(np.median(lines))
    values = [value for value in values if not math.isnan(value)]
    return float(np.median(values)) if values else math.nan


def _entry(study: Study, label: str) -> dict[str, Any]:
    """Return the entry of a variant in speed.json, empty if there is none."""
    return (study.speed or {}).get("variants", {}).get(label) or {}


def _timed(study: Study, label: str) -> float:
    return _seconds(_entry(study, label))


def _beside(study: Study, label: str, baseline: str) -> float:
    """Return the median over rounds of a step's ratio to the plain model's, or to the baseline's if that was not
    timed."""
    entry, base = _entry(study, label), (study.speed or {}).get("plain") or _entry(study, baseline)
    rounds = [one.get("times") or [_seconds(one)] for one in (entry, base)]
    return spread(*rounds).ratio if len(rounds[0]) == len(rounds[1]) else _seconds(entry) / _seconds(base)


def _seconds(entry: dict[str, Any] | None) -> float:
    """Return the median step of an entry of speed.json."""
    return float((entry or {}).get("median_s") or math.nan)


def _quartiles(study: Study, label: str) -> tuple[float, float]:
    low, high = _entry(study, label).get("ratio_quartiles") or (math.nan, math.nan)
    return float(low), float(high)


def _doubt(study: Study, rows: list[VariantRow]) -> str:
    """Return the reason why a timing is unreliable (too few rounds, or rounds that differ too much); empty if it is
    reliable."""
    entries = (study.speed or {}).get("variants", {})
    rounds = [len(entry["times"]) for entry in entries.values() if isinstance(entry, dict) and entry.get("times")]
    if rounds and min(rounds) < ROUNDS:
        return f"only {min(rounds)} rounds were timed (at least {ROUNDS} are needed)"
    wide = [row for row in rows if row.step_quartiles[1] > SPREAD * row.step_quartiles[0]]
    if wide:
        low, high = wide[0].step_quartiles
        return f"the rounds differ too much: half of those of {wide[0].label} lie between {low:.2f}× and {high:.2f}×"
    return ""


def _tokens_a_step(run: Run) -> float:
    size, length = run.config.get("batch_size"), run.config.get("data", {}).get("seq_len")
    return math.nan if size is None or length is None else float(size * length)


# ------------------------------------------------------------------ notes under the table


def _notes(study: Study, rows: list[VariantRow], baseline: str | None, interleaved: bool, doubt: str) -> list[str]:
    notes = _what_the_losses_error_is(rows)
    pairs = [row.paired for row in rows if row.paired is not None]
    if pairs:
        notes.append(_what_the_error_is(study, {row.label: row.paired for row in rows if row.paired}, baseline or ""))
        early = [row for row in rows if row.paired and row.paired.step < max(row.step, _last(study, baseline))]
        if early:
            steps = ", ".join(f"{row.label} at step {row.paired.step:,}" for row in early if row.paired)
            notes.append(f"Differences are taken at the last step that both runs have: {steps}.")
    if any(not math.isnan(row.tokens_saved) for row in rows):
        notes.append(
            f"Tokens saved: the tokens that {baseline} needs to reach the lowest loss that both have reached, divided "
            f"by the variant's own, read between measured points of the curves. {UNDERSTATED} Time saved: the same "
            "ratio in the time of steps."
        )
    if baseline and baseline != study.baseline:
        notes.append(f"The baseline is {baseline}: the best of the {kind_name(study, baseline)} runs.")
    reasons: dict[str, list[str]] = {}
    for row in rows if baseline else []:
        if row.paired is None and row.label != baseline:
            reasons.setdefault(why_unpaired(study, row.label, baseline or ""), []).append(row.label)
    notes += [f"No difference to {baseline} for {listed(labels)}: {reason}." for reason, labels in reasons.items()]
    if any(not math.isnan(row.step_ratio) for row in rows) and len(rows) > 1:
        if doubt:
            notes.append(f"Tokens/s and step time are withheld: {doubt}; table.csv has them.")
        elif interleaved:
            device = str((study.speed or {}).get("device") or "")
            if (study.speed or {}).get("plain"):
                notes.append(
                    "Step time is relative to the plain model: the unmodified Transformers model of the same size."
                )
            notes.append(
                "Tokens/s and step time: whole training steps of the variants, interleaved in one process, medians"
                + (f" ({device})" if device else "")
                + "; in brackets the quartiles of the rounds' ratios." * any(r.step_quartiles[0] > 0 for r in rows)
                + "." * (not any(r.step_quartiles[0] > 0 for r in rows))
            )
        else:
            notes.append(
                "The variants' steps were not interleaved: tokens/s and step time are medians of each run's own steps. "
                "Runs had the machine at other times or shared it, so that small differences say nothing."
            )
    started = [f"{row.label} {number(row.start_loss)}" for row in rows if not math.isnan(row.start_loss)]
    if started:
        notes.append(f"Held-out loss before the first step: {listed(started)}.")
    unfinished = []
    for row in rows:
        steps = f" of {row.runs[0].steps:,}" if row.runs[0].steps else ""
        if row.finished and not row.complete:
            unfinished.append(
                f"{row.label} ({row.finished} of {len(row.runs)} seeds finished, whose numbers these are)"
            )
        elif not row.finished:
            unfinished.append(f"{row.label} at step {row.step:,}{steps}")
    if unfinished:
        notes.append(f"Unfinished, so preliminary: {', '.join(unfinished)}.")
    notes += [f"{run.unread}; what it would show is left out." for run in study.runs if run.unread]
    if study.missing:
        notes.append(f"Planned but not started: {listed(study.missing)}.")
    return notes


def _last(study: Study, baseline: str | None) -> int:
    return min((run.last_step for run in study.of(baseline)), default=0) if baseline else 0


def _what_the_losses_error_is(rows: list[VariantRow]) -> list[str]:
    """Return the sentence about the errors in the column of losses, see `stats.mean_loss`."""
    seeds = [row.finished or len(row.runs) for row in rows if not math.isnan(row.loss_se)]
    if not seeds:
        return []
    many = [count >= SEEDS_FOR_SEED_ERROR for count in seeds]
    over = "seeds" if all(many) else "windows, or seeds where there are several" if any(many) else "windows"
    shared = (
        ", some of it common to all variants, which the difference leaves out"
        if any(row.paired for row in rows)
        else ""
    )
    return [f"Held-out loss: ± is its standard error over {over}{shared}."]


def _what_the_error_is(study: Study, pairs_by_label: dict[str, Paired], baseline: str) -> str:
    """Return the note on the errors in the column of differences: their rule, and what they are taken over."""
    pairs = list(pairs_by_label.values())
    windows = listed([f"{count:,}" for count in sorted({pair.windows for pair in pairs})])
    what = f"Difference: loss minus that of {baseline} on the same {windows} held-out windows. "
    others = [label for label in pairs_by_label if not is_planned(study, label, baseline)]
    holm = f" ({listed(others)} held together by Holm's procedure)" if len(others) > 1 else ""
    if not any(pair.over_seeds for pair in pairs):
        return what + (
            "± is its standard error over windows; it does not include what other seeds would change "
            f"(that takes {SEEDS_FOR_SEED_ERROR} seeds); bold is beyond its 95 % interval{holm}."
        )
    by_windows = [label for label, pair in pairs_by_label.items() if pair.basis == "windows"]
    over = "over windows, wider here than that over seeds"
    if len(by_windows) < len(pairs):
        over = "from all runs under equal conditions (loss = variant + seed)"
        over += f", for {listed(by_windows)} over windows, where that is wider" if by_windows else ""
    return what + f"± is its standard error {over}; 95 % intervals by Student's t{holm}."
