"""Differences between variants with their errors: paired over the same held-out windows, and over seeds.

Only runs under equal conditions are paired: nothing but the residual and the learning rate may differ between them.
"""

import json
import math
from dataclasses import dataclass

import numpy as np

from attnres.report.runs import Run, Study
from attnres.stats import standard_error, t_quantile
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
"""Those of them that a search for the best learning rate changes; that of the residual's own parameters."""
CHECKSUMS = ("windows_sha256", "tokenizer_sha256", "splits")
"""Keys of data.json that tell one text from another."""
OWN = (
    *("seed", "name", "out", "resume", "track", "device", "allow_different"),
    *("save_every", "keep_at", "val_every", "log_every", "depth_every"),
)
"""Fields that are no condition: each run's own, where it ran, and how often it was saved and measured."""


@dataclass(frozen=True)
class Paired:
    """A variant's loss minus another's on the same held-out windows, in nats per token; negative is better.

    `se` and the interval `mean +- margin` (Student's t, 95 % over all variants that are held against the baseline,
    as Bonferroni has it) are over windows, and from two seeds on over seeds;
    there the interval over windows is kept where it is the wider one, since a few seeds may agree by luck and all of
    them were measured on the same windows. `basis` says which.
    """

    mean: float
    se: float
    margin: float
    basis: str  # "seeds" or "windows"
    se_windows: float
    se_seeds: float
    per_seed: tuple[float, ...]
    windows: int
    step: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes no difference (NaN, from a single window, excludes nothing)."""
        return abs(self.mean) > self.margin

    @property
    def over_seeds(self) -> bool:
        """Whether there are seeds enough to say anything of another one."""
        return len(self.per_seed) >= SEEDS_FOR_SEED_ERROR


def unequal(a: Run, b: Run) -> list[str]:
    """The conditions in which two runs differ, seeds aside: fields of the configuration, and the text itself.

    The text is the same if the checksums of its tokens are; where a run does not have them, the data settings and the
    number of windows have to do.
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
    """Runs of two variants matched by seed, where nothing but the variant differs: the finished ones, or all of them
    while none has finished."""
    by_seed = {run.seed: run for run in others}
    both = [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed and not unequal(run, by_seed[run.seed])]
    return [pair for pair in both if all(run.finished for run in pair)] or both


def why_unpaired(study: Study, label: str, other: str) -> str:
    """What keeps two labels from being compared, to follow a colon."""
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
    """Whether all runs of a study may be compared, each label with the same seeds."""
    seeds = {tuple(run.seed for run in study.of(label)) for label in study.labels}
    return len(seeds) == 1 and not any(unequal(study.runs[0], run) for run in study.runs[1:])


def kind(run: Run) -> tuple[str, str]:
    """What a variant is without its learning rate: the residual, its settings, and how its parameters are trained, the
    residual's own rate as a fraction of the rate.

    What is off or has no value counts as not given: an older run's configuration may lack it.
    """
    settings = {name: value for name, value in leaves(run.config) if name.startswith(COMPARED) and value}
    rate = settings.get(OWN_RATE)
    if isinstance(rate, float) and run.lr:
        settings[OWN_RATE] = round(rate / run.lr, 9)
    return run.residual, json.dumps({name: settings[name] for name in settings if name not in RATES}, sort_keys=True)


def kind_name(study: Study, label: str) -> str:
    """A label without its learning rate."""
    lr = study.of(label)[0].lr
    return label if lr is None else label.removesuffix(f"-lr{lr:g}")


def common_steps(matched: list[tuple[Run, Run]]) -> list[int]:
    """Steps at which every one of these runs was measured, on equally many windows."""
    if not matched:
        return []
    steps = sorted(set.intersection(*(a.windows.keys() & b.windows.keys() for a, b in matched)))
    return [step for step in steps if len({run.windows[step].shape for pair in matched for run in pair}) == 1]


def interval(
    se_windows: float, windows: int, se_seeds: float, seeds: int, comparisons: int = 1
) -> tuple[str, float, float]:
    """What an error is over, it, and half of its interval, 95 % over so many comparisons together: over seeds from
    two on, unless that over windows is the wider one."""
    point = 1 - 0.025 / comparisons
    margin = t_quantile(point, windows - 1) * se_windows if windows > 1 else math.nan
    if seeds >= SEEDS_FOR_SEED_ERROR and not (by_seeds := t_quantile(point, seeds - 1) * se_seeds) < margin:
        return "seeds", se_seeds, by_seeds
    return "windows", se_windows, margin


def compared(study: Study) -> int:
    """How many variants a study holds against its baseline."""
    return max(1, len(study.labels) - 1)


def paired_at(matched: list[tuple[Run, Run]], step: int, comparisons: int = 1) -> Paired:
    """The difference of matched runs at a step that all of them have, one of so many that are looked at together."""
    diffs = np.stack([a.windows[step] - b.windows[step] for a, b in matched])  # (seeds, windows)
    per_seed = diffs.mean(axis=1)
    se_windows, se_seeds = standard_error(diffs.mean(axis=0)), standard_error(per_seed)
    seeds, windows = diffs.shape
    basis, se, margin = interval(se_windows, windows, se_seeds, seeds, comparisons)
    return Paired(
        mean=float(diffs.mean()),
        se=se,
        margin=margin,
        basis=basis,
        se_windows=se_windows,
        se_seeds=se_seeds,
        per_seed=tuple(float(value) for value in per_seed),
        windows=windows,
        step=step,
    )


def paired(study: Study, label: str, other: str) -> Paired | None:
    """`label` minus `other` at the last step both have; None where they share no seed, step or windows."""
    if label == other:
        return None
    matched = pairs(study.of(label), study.of(other))
    steps = common_steps(matched)
    return paired_at(matched, steps[-1], compared(study)) if steps else None


def paired_curve(study: Study, label: str, other: str) -> list[Paired]:
    """The same at every step that both have."""
    matched = pairs(study.of(label), study.of(other))
    return [paired_at(matched, step, compared(study)) for step in common_steps(matched)]


def final_loss(run: Run) -> float:
    """Held-out loss at the end, or at the last measurement of an unfinished run; NaN before the first."""
    if run.summary is not None and run.summary.get("val_loss") is not None:
        return float(run.summary["val_loss"])
    return float(run.val[-1]["loss"]) if run.val else math.nan


def final_loss_se(run: Run) -> float:
    """Standard error of `final_loss` over held-out windows."""
    if run.windows:
        return standard_error(run.windows[max(run.windows)])
    record = run.summary or (run.val[-1] if run.val else {})
    return float(record.get("val_se") or record.get("se") or math.nan)


def mean_loss(study: Study, label: str) -> tuple[float, float]:
    """Mean over seeds of the final held-out loss, with its standard error (over seeds from two on, else windows)."""
    runs = [run for run in study.counted(label) if not math.isnan(final_loss(run))]
    if not runs:
        return math.nan, math.nan
    losses = np.array([final_loss(run) for run in runs])
    if len(runs) >= SEEDS_FOR_SEED_ERROR:
        return float(losses.mean()), standard_error(losses)
    return float(losses.mean()), float(np.mean([final_loss_se(run) for run in runs]))


def strongest_baseline(study: Study) -> str | None:
    """The label the others are held against.

    That is the study's baseline; where it was trained at several learning rates, the one of them with the lowest
    held-out loss, so that no variant wins against a badly tuned opponent.
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
    """Whether some residual with some settings was trained at several learning rates."""
    rates: dict[tuple[str, str], set[float | None]] = {}
    for run in study.runs:
        rates.setdefault(kind(run), set()).add(run.lr)
    return any(len(values) > 1 for values in rates.values())
