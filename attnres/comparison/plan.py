"""Make the runs of a comparison: every variant with every seed, each with its whole configuration."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnres.errors import UserError, unknown
from attnres.models import Checkpoint
from attnres.ops.devices import pick_device
from attnres.residuals import RESIDUALS, residual_class, settings_of, source_file
from attnres.residuals.registry import ships
from attnres.text import run_name
from attnres.training.config import OptimConfig, TrainConfig, from_dict
from attnres.training.environment import has_bf16
from attnres.training.prepare import PreparedRun, idle, prepare_run, refuse_idle, without_idle
from attnres.training.start import open_start

SYNTAX = (
    "RESIDUAL[:SETTING=VALUE,...][@NAME=VALUE,...], e.g. standard, block:num_blocks=6, mine.py:Mine or block@lr=0.003"
)

TRAINING = {
    "residual_lr": "optim",
    "residual_decay": "optim",
    "train_only": "finetune",
    "lora_rank": "finetune",
    "lora_alpha": "finetune",
    "distill_weight": "finetune",
    "distill_temperature": "finetune",
}
"""Names allowed after '@' besides lr, and the part of the configuration that each belongs to."""


@dataclass(frozen=True)
class VariantSpec:
    """One column of a comparison. `lr` None takes that of the base configuration; `training` holds names in `TRAINING`,
    `file` the FILE.py:CLASS of a mechanism outside the package."""

    residual: str
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    training: dict[str, Any] = field(default_factory=dict)
    file: str | None = None

    @property
    def label(self) -> str:
        """Return the name in tables and folders: `block`, `block-num_blocks6`, `block-train_onlylora`,
        `block-lr0.003`."""
        parts = [self.residual, *(f"{name}{value}" for name, value in {**self.settings, **self.training}.items())]
        parts = [re.sub("[:=]", "_", part) for part in parts]
        return "-".join([*parts, f"lr{self.lr:g}"] if self.lr is not None else parts)


def label_of(variant: str) -> str:
    return parse_variant(variant).label


def parse_variant(text: str) -> VariantSpec:
    """Parse the text of one variant.

    >>> parse_variant("block:num_blocks=6@lr=0.003").label
    'block-num_blocks6-lr0.003'

    Raises:
        UserError: wrong syntax; an unknown residual, setting or name after '@', with the nearest valid one.
    """
    match = re.fullmatch(
        r"(?P<residual>[^@]*\.py:[^:@]*|[^:@]*)(:(?P<settings>[^@]*))?(@(?P<training>.*))?", text.strip()
    )
    if match is None or not match["residual"]:
        raise UserError(f"variant '{text}' is not understood: expected {SYNTAX}")
    residual = residual_class(match["residual"]).name
    valid = settings_of(residual)
    settings = _pairs(text, match["settings"], "SETTING", f"setting of residual '{residual}'", valid)
    training = _pairs(text, match["training"], "NAME", "name after '@'", ("lr", *TRAINING))
    lr = training.pop("lr", None)
    rate = None if lr is None else _rate(lr, f"variant '{text}'")
    return VariantSpec(residual, settings, rate, training, source_file(residual))


def _pairs(text: str, settings: str | None, what: str, kind: str, valid: Iterable[str]) -> dict[str, Any]:
    """Return the values of `NAME=VALUE,...` by name; empty for an empty text."""
    values: dict[str, Any] = {}
    for part in [] if settings is None else settings.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise UserError(f"variant '{text}': '{part}' is not {what}=VALUE; expected {SYNTAX}")
        if name not in valid:
            raise unknown(kind, name, valid)
        if not re.fullmatch(r"[\w.+:=-]+", value):  # it becomes part of a folder's name
            raise UserError(
                f"variant '{text}': the value '{value}' of {name} has other characters than letters, digits and _.+:=-"
            )
        values[name] = setting_value(value)
    return values


def parse_variants(texts: Sequence[str], lrs: Sequence[float] = ()) -> list[VariantSpec]:
    """Parse several variants; those without a learning rate are taken at each of `lrs`, if any are given.

    Raises:
        UserError: no variant, or the same one twice.
    """
    if not texts:
        raise UserError(f"no variant given: expected at least one of {', '.join(RESIDUALS)}")
    variants = []
    for variant in map(parse_variant, texts):
        if variant.lr is None and lrs:
            variants += [dataclasses.replace(variant, lr=_rate(lr, "lrs")) for lr in lrs]
        else:
            variants.append(variant)
    labels = [variant.label for variant in variants]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"variant '{label}' is given {labels.count(label)} times: give each one once")
    return variants


def _rate(value: str | float, where: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise UserError(f"{where}: the learning rate is '{value}', expected a number above 0")
    return rate


def setting_value(text: str) -> int | float | bool | str:
    """Return a setting as the first type that its text fits: 6, 0.5, true, mean."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            if math.isfinite(value := kind(text)):
                return value
    return text


# ------------------------------------------------------------------ runs


@dataclass
class CompareConfig:
    """Configuration of a comparison: variants, seeds, and everything else as in `base`."""

    variants: list[str] = field(default_factory=lambda: ["standard", "block", "full", "rescaled"])
    seeds: list[int] = field(default_factory=lambda: [0])
    lrs: list[float] = field(default_factory=list)
    base: TrainConfig = field(default_factory=TrainConfig)
    out: str = "runs/compare"
    jobs: int | None = None
    timing_s: float = 10.0


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison by name (`LABEL-seedK`), and the label of the baseline."""

    variants: dict[str, VariantSpec]
    runs: dict[str, TrainConfig]
    baseline: str
    notes: tuple[str, ...] = ()
    """A sentence for each default that was changed to suit the given options."""
    start: Checkpoint | None = None
    """The opened model that all runs start from; None for newly initialised models."""

    @property
    def first(self) -> TrainConfig:
        """Return one of the runs, for the settings that all share: data, batch, device, precision."""
        return next(iter(self.runs.values()))


def make_plan(config: CompareConfig, here: bool = True) -> ComparisonPlan:
    """Return every run's full configuration, all checked, so that a mistake in the last variant shows before the first
    is trained."""
    base = config.base
    if not config.seeds or len(set(config.seeds)) < len(config.seeds) or min(config.seeds) < 0:
        raise UserError(f"seeds are {config.seeds}: expected different whole numbers from 0, e.g. 0 1 2")
    if config.jobs is not None and config.jobs < 1:
        raise UserError(f"jobs is {config.jobs}: expected 1 or more runs at a time")
    if not 0 <= config.timing_s < math.inf:
        raise UserError(f"timing_s is {config.timing_s}: expected seconds, 0 or more")
    variants = {variant.label: variant for variant in parse_variants(config.variants, config.lrs)}
    for variant in variants.values():
        if variant.file is None and not ships(variant.residual):
            raise UserError(
                f"residual '{variant.residual}' was registered in this process, and each run of a comparison has a "
                "process of its own: give it as FILE.py:CLASS"
            )
    device = str(pick_device(base.device)) if here else base.device
    dtype = base.dtype
    if here and dtype == "auto":
        dtype = "bf16" if has_bf16(torch.device(device)) else "fp32"
    start = None if base.finetune.init_from is None else open_start(base.finetune.init_from)
    prepared: dict[str, PreparedRun] = {}
    for label, variant in variants.items():
        model = dataclasses.replace(
            base.model,
            residual=variant.residual,
            residual_file=variant.file,
            residual_sha256=None,
            settings={**variant.settings},
            block_size=None,
            num_blocks=None,
        )
        run = dataclasses.replace(
            base,
            model=model,
            optim=_at_rate(base.optim, variant.lr),
            seed=max(config.seeds),  # the largest seed, which is the one that may be out of range
            name=label,
            device=device,
            dtype=dtype,
            resume=True,
        )
        # What the base configuration sets for other variants is no setting of this one.
        training_fields = [f"{TRAINING[setting]}.{setting}" for setting in variant.training]
        run = without_idle(from_dict(_training(variant), run), kept=training_fields)
        prepared[label] = prepare_run(run, start=start)
    used_by_none = set(idle(base)).intersection(*(idle(from_dict(_training(one), base)) for one in variants.values()))
    refuse_idle(without_idle(base, kept={name for name in used_by_none if name.startswith("finetune.")}))
    runs = {}
    for seed in config.seeds:  # seed by seed, so that the first runs to finish make one whole comparison
        for label, one in prepared.items():
            name = run_name(label, seed)
            runs[name] = dataclasses.replace(one.config, seed=seed, name=name, out=str(Path(config.out) / name))
    baseline = next(
        (label for label, variant in variants.items() if variant.residual == "standard"), next(iter(variants))
    )
    notes = tuple(dict.fromkeys(note for one in prepared.values() for note in one.notes))
    return ComparisonPlan(variants, runs, baseline, notes, start)


def _training(variant: VariantSpec) -> dict[str, dict[str, Any]]:
    """Return the training settings of a variant, by section of the configuration, to override those of the base."""
    values: dict[str, dict[str, Any]] = {}
    for name, value in variant.training.items():
        values.setdefault(TRAINING[name], {})[name] = value
    return values


def _at_rate(optim: OptimConfig, lr: float | None) -> OptimConfig:
    """Return `optim` at another peak learning rate. Muon's rate, and the residual's if set, change by the same
    factor."""
    if lr is None or optim.lr <= 0:  # no rate to scale: checking the run refuses it
        return optim
    factor = lr / optim.lr
    muon_lr = optim.muon_lr * factor if optim.optimizer == "muon" else optim.muon_lr
    residual_lr = None if optim.residual_lr is None else optim.residual_lr * factor
    return dataclasses.replace(optim, lr=lr, muon_lr=muon_lr, residual_lr=residual_lr)
