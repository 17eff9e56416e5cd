"""Paired differences between variants with their errors, over the same held-out windows and over seeds.

Only runs under equal conditions are paired: they may differ only in the residual and the learning rate.
"""

import json
import math
from dataclasses import dataclass, replace

import numpy as np

from attnres.report.runs import Run, Study
from attnres.stats import ALPHA, QUESTIONS, Effect, Recipe, judged, standard_error
from attnres.typed import leaves

SEEDS_FOR_SEED_ERROR = 2

COMPARED = (
    *("model.residual", "model.settings", "model.block_size", "model.num_blocks"),
    *("optim.lr", "optim.muon_lr", "optim.residual_lr"),
    *("optim.residual_hold", "optim.residual_warmup", "optim.residual_decay"),
    *("finetune.train_only", "finetune.lora_", "finetune.distill_"),
)
"""Fields of the configuration in which variants may differ."""
RATES, OWN_RATE = ("optim.lr", "optim.muon_lr"), "optim.residual_lr"
"""The fields of `COMPARED` that a learning-rate search changes, and the learning rate of the residual's parameters."""
CHECKSUMS = ("windows_sha256", "tokenizer_sha256", "splits")
"""Keys of data.json that identify the text."""
OWN = (
    *("seed", "name", "out", "resume", "track", "device", "allow_different"),
    *("save_every", "keep_at", "val_every", "log_every", "depth_every"),
)
"""Fields that are no conditions: a run's seed, name and folder, its machine, and how often it was saved and
evaluated."""


@dataclass(frozen=True)
class Paired:
    """A variant's loss minus another's, in nats per token; negative is better.

    Attributes:
        effect: the difference with its interval. The interval is over seeds, by `attnres.stats.Recipe` over all runs
            under equal conditions. It is over held-out windows if each variant has one seed, or if that interval is
            wider, since a few seeds may agree by luck and all were evaluated on the same windows.
        basis: "seeds" or "windows", the one that the interval is over. se_seeds, se_windows: both standard errors, NaN
            if unknown.
        per_seed: the difference for each common seed.
    """

    effect: Effect
    basis: str
    se_windows: float
    se_seeds: float
    per_seed: tuple[float, ...]
    windows: int
    step: int

    @property
    def mean(self) -> float:
        return self.effect.difference

    @property
    def se(self) -> float:
        return self.effect.error

    @property
    def margin(self) -> float:
        return self.effect.margin

    @property
    def decided(self) -> bool:
        """Return whether the interval excludes 0; False for NaN, from a single window."""
        return self.effect.excludes()

    @property
    def over_seeds(self) -> bool:
        """Return whether there are enough seeds for a statement about further ones."""
        return not math.isnan(self.se_seeds)


def unequal(a: Run, b: Run) -> list[str]:
    """Return the conditions, other than the seed, in which two runs differ: fields of the configuration, and the text
    itself.

    Texts are compared by the checksums of their tokens; if a run lacks them, by the data settings and the number of
    windows.
    """
    left, right = (
        {name: value for name, value in leaves(run.config) if name not in OWN and not name.startswith(COMPARED)}
        for run in (a, b)
    )
    names = [name for name in dict.fromkeys([*left, *right]) if left.get(name) != right.get(name)]
    sums = [key for key in CHECKSUMS if key in a.data and key in b.data]
    counts = [(len(a.windows[step]), len(b.windows[step])) for step in a.windows.keys() & b.windows.keys()]
    other_text = any(a.data[key] != b.data[key] for key in sums) or any(mine != theirs for mine, theirs in counts)
    if other_text and not any(name.startswith("data.") for name in names):
        names.append("text")
    return names


def pairs(runs: list[Run], others: list[Run]) -> list[tuple[Run, Run]]:
    """Return runs of two variants matched by seed that differ only in the variant: the finished ones, or all if none
    has finished."""
    by_seed = {run.seed: run for run in others}
    both = [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed and not unequal(run, by_seed[run.seed])]
    return [pair for pair in both if all(run.finished for run in pair)] or both


def why_unpaired(study: Study, label: str, other: str) -> str:
    """Return the reason why two labels are not compared, to follow a colon."""
    mine, theirs = study.of(label), study.of(other)
    reasons = dict.fromkeys(name for a in mine for b in theirs for name in unequal(a, b))
    if reasons:
        return f"they differ in {', '.join(reasons)}"
    if not {run.seed for run in mine} & {run.seed for run in theirs}:
        return "no seed in common"
    if len({len(windows) for run in (*mine, *theirs) for windows in run.windows.values()}) > 1:
        return "their seeds were measured on different numbers of windows"
    return "no measurement at the same step"


def equal_conditions(study: Study) -> bool:
    """Return whether all runs of a study may be compared, each label with the same seeds."""
    seeds = {tuple(run.seed for run in study.of(label)) for label in study.labels}
    return len(seeds) == 1 and not any(unequal(study.runs[0], run) for run in study.runs[1:])


def kind(run: Run) -> tuple[str, str]:
    """Return a variant's identity without its learning rate: the residual, its settings, and how its parameters are
    trained, with the residual's learning rate as a fraction of the model's.

    Settings that are off or None are left out, because an older run's configuration may lack them.
    """
    settings = {name: value for name, value in leaves(run.config) if name.startswith(COMPARED) and value}
    rate = settings.get(OWN_RATE)
    if isinstance(rate, float) and run.lr:
        settings[OWN_RATE] = round(rate / run.lr, 9)
    return run.residual, json.dumps({name: settings[name] for name in settings if name not in RATES}, sort_keys=True)


def kind_name(study: Study, label: str) -> str:
    """Return a label without its learning rate."""
    lr = study.of(label)[0].lr
    return label if lr is None else label.removesuffix(f"-lr{lr:g}")


def common_steps(matched: list[tuple[Run, Run]]) -> list[int]:
    """Return the steps at which all of these runs were evaluated, on equally many windows."""
    if not matched:
        return []
    steps = sorted(set.intersection(*(a.windows.keys() & b.windows.keys() for a, b in matched)))
    return [step for step in steps if len({run.windows[step].shape for pair in matched for run in pair}) == 1]


def is_planned(study: Study, label: str, other: str) -> bool:
    """Return whether the comparison is pre-registered and appears once in this study."""
    names = [study.of(one)[0].residual for one in study.labels]
    residuals = study.of(label)[0].residual, study.of(other)[0].residual
    return residuals in QUESTIONS and all(names.count(name) == 1 for name in residuals)


def paired_at(matched: list[tuple[Run, Run]], step: int, level: float = ALPHA, study: Study | None = None) -> Paired:
    """Return the difference of two variants at a step that all these matched runs have, with its 1 - `level` interval.

    Other runs of the `study` under equal conditions, and other seeds of the two variants, contribute to the noise
    estimate and the means.
    """
    diffs = np.stack([a.windows[step] - b.windows[step] for a, b in matched])  # (seeds, windows)
    per_seed, windows = diffs.mean(axis=1), diffs.shape[1]
    effect = Effect(float(diffs.mean()), standard_error(diffs.mean(axis=0)), windows - 1, level)
    variant_run, baseline_run = matched[0]
    comparable = [run for label in study.labels for run in study.counted(label)] if study else []
    comparable = [
        run for run in comparable if len(run.windows.get(step, ())) == windows and not unequal(run, baseline_run)
    ]
    by_seeds = Effect(math.nan, math.nan, 0, level)
    if {variant_run.label, baseline_run.label} <= {run.label for run in comparable}:
        recipe = Recipe((run.label, run.seed, float(run.windows[step].mean())) for run in comparable)
        by_seeds = recipe.effect(variant_run.label, baseline_run.label, level)
    by_windows, basis = effect, "windows"
    if by_seeds.degrees:
        effect = by_windows._replace(difference=by_seeds.difference)
        if not by_seeds.margin < by_windows.margin:
            effect, basis = by_seeds, "seeds"
    return Paired(
        effect=effect,
        basis=basis,
        se_windows=by_windows.error,
        se_seeds=by_seeds.error,
        per_seed=tuple(float(value) for value in per_seed),
        windows=windows,
        step=step,
    )


def against(study: Study, other: str) -> dict[str, Paired]:
    """Return every variant minus `other` at their last common step, except for variants that share no seed, step or
    windows.

    Pre-registered comparisons are tested at 5 % each, all others together by Holm's method.
    """
    differences: dict[str, Paired] = {}
    for label in study.labels:
        matched = pairs(study.of(label), study.of(other)) if label != other else []
        if steps := common_steps(matched):
            differences[label] = paired_at(matched, steps[-1], study=study)
    effects = judged(
        [one.effect for one in differences.values()], [is_planned(study, label, other) for label in differences]
    )
    return {
        label: replace(one, effect=effect) for (label, one), effect in zip(differences.items(), effects, strict=True)
    }


def paired(study: Study, label: str, other: str) -> Paired | None:
    """Return `label` minus `other`; None if they share no seed, step or windows."""
    return against(study, other).get(label)


def paired_curve(study: Study, last: Paired, label: str, other: str) -> list[Paired]:
    """Return the paired difference at every common step, each with an interval at the level of `last`."""
    matched = pairs(study.of(label), study.of(other))
    return [paired_at(matched, step, last.effect.level, study) for step in common_steps(matched)]


def final_loss(run: Run) -> float:
    """Return the held-out loss at the end, or at the last evaluation of an unfinished run; NaN before the first."""
    if run.summary is not None and run.summary.get("val_loss") is not None:
        return float(run.summary["val_loss"])
    return float(run.val[-1]["loss"]) if run.val else math.nan


def mean_loss(study: Study, label: str) -> tuple[float, float]:
    """Return the mean over seeds of the final held-out loss, with its standard error (over seeds from two on, else
    windows)."""
    runs = [run for run in study.counted(label) if not math.isnan(final_loss(run))]
    if not runs:
        return math.nan, math.nan
    losses = np.array([final_loss(run) for run in runs])
    if len(runs) >= SEEDS_FOR_SEED_ERROR:
        return float(losses.mean()), standard_error(losses)
    records = [run.summary or (run.val[-1] if run.val else {}) for run in runs]
    errors = [
        standard_error(run.windows[max(run.windows)])
        if run.windows
        else float(record.get("val_se") or record.get("se") or math.nan)
        for run, record in zip(runs, records, strict=True)
    ]
    return float(losses.mean()), float(np.mean(errors))


def strongest_baseline(study: Study) -> str | None:
    """Return the label that the others are compared with.

    This is the study's baseline. If it was trained at several learning rates, it is the one with the lowest held-out
    loss, so that no variant wins against a badly tuned baseline.
    """
    if study.baseline is None:
        return None
    first = study.of(study.baseline)[0]
    rivals = [
        label
        for label in study.labels
        for run in study.of(label)[:1]
        if label == study.baseline or (run.lr != first.lr and kind(run) == kind(first) and not unequal(run, first))
    ]
    losses = {label: mean_loss(study, label)[0] for label in rivals if all(run.finished for run in study.of(label))}
    return min(losses, key=losses.__getitem__) if losses else study.baseline


def sweeps_lr(study: Study) -> bool:
    """Return whether some residual with fixed settings was trained at several learning rates."""
    rates: dict[tuple[str, str], set[float | None]] = {}
    for run in study.runs:
        rates.setdefault(kind(run), set()).add(run.lr)
    return any(len(values) > 1 for values in rates.values())
