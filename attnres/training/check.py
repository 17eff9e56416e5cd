"""What of a training run's configuration cannot run, or would change nothing: refused before anything happens."""

import dataclasses
import math
from collections.abc import Callable, Container
from typing import Any

from attnres.errors import UserError, unknown
from attnres.training.config import ParallelConfig, TrainConfig, from_dict, merged_settings, to_dict, unused
from attnres.typed import leaves

BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "it must be a number above 0",
        lambda value: 0 < value < math.inf,
        "steps batch_size accumulation parallel.dp parallel.shard parallel.pp parallel.pp_virtual "
        "parallel.tp parallel.cp keep_at val_every log_every save_every data.seq_len data.val_windows data.limit "
        "optim.lr optim.muon_lr optim.residual_lr optim.base_width finetune.lora_rank finetune.lora_alpha "
        "finetune.distill_temperature",
    ),
    (
        "it must be 0 or more",
        lambda value: 0 <= value < math.inf,
        "depth_every seed parallel.pp_layers optim.weight_decay optim.residual_decay optim.clip",
    ),
    (
        "it is a fraction, from 0 to 1",
        lambda value: 0 <= value <= 1,
        "optim.min_lr_ratio optim.warmup optim.decay optim.residual_hold optim.residual_warmup finetune.distill_weight",
    ),
    ("decay rates lie from 0 to below 1", lambda value: 0 <= value < 1, "optim.betas optim.momentum"),
    ("it is the fraction of documents held out, between 0 and 1", lambda value: 0 < value < 1, "data.held_out"),
)
"""What numbers may be, and the fields that it holds for where they are given."""


def check(config: TrainConfig, world_size: int = 1) -> None:
    """Refuse what cannot run, before anything is written: raises UserError, returns nothing.

    Whether the residual's settings are possible is checked when the model is built, which knows its depth.
    """
    from attnres.models.build import SIZES
    from attnres.residuals import check_settings, residual_class

    from_dict(dataclasses.asdict(config))  # which refuses values of a wrong type
    if isinstance(config.model.size, str) and config.model.size not in SIZES:
        raise unknown("size", config.model.size, SIZES)
    mechanism = residual_class(config.model.residual, config.model.residual_file)
    check_settings(mechanism.name, merged_settings(config.model))
    optim, finetune = config.optim, config.finetune
    if config.device.split(":")[0] not in ("auto", "cpu", "cuda"):
        raise unknown("device", config.device, ("auto", "cpu", "cuda"))
    _check_bounds(config)
    if config.keep_at and max(config.keep_at) > config.steps:
        raise UserError(
            f"keep_at is {list(config.keep_at)}: the run has {config.steps} steps, give some from 1 to {config.steps}"
        )
    if config.seed > 2**32 - world_size:  # NumPy's limit; each process adds its rank
        raise UserError(f"seed is {config.seed}: it must be at most {2**32 - world_size}")
    for name in ("train_only", "distill_weight", "inexact"):
        if finetune.init_from is None and getattr(finetune, name) not in ("all", 0, False):
            raise UserError(
                f"finetune.{name} is {getattr(finetune, name)} and the model is new: give init_from, the pretrained "
                "model it is about"
            )
    refuse_idle(config)
    if finetune.init_from is not None and optim.base_width is not None:
        raise UserError(
            f"optim.base_width is {optim.base_width} and the model is {finetune.init_from}: it carries rates and start "
            "values to new models alone, leave it out"
        )
    if optim.schedule == "wsd" and optim.warmup + optim.decay > 1:
        raise UserError(
            f"optim.warmup {optim.warmup} and optim.decay {optim.decay} together exceed the run: "
            "they are fractions of the steps, make their sum at most 1"
        )
    copies = shares_of(config, world_size)
    shares = config.accumulation * copies
    if config.batch_size % shares:
        processes = f" x {copies} processes" if copies > 1 else ""
        below = config.batch_size // shares * shares
        near = f"{below} or {below + shares}" if below else f"{shares}"
        raise UserError(
            f"batch_size {config.batch_size} does not divide into accumulation {config.accumulation}{processes}: "
            f"use a multiple of {shares}, e.g. {near}"
        )


def _check_bounds(config: TrainConfig) -> None:
    values = dict(leaves(to_dict(config)))
    for requirement, fits, names in BOUNDS:
        for name in names.split():
            value = values[name]
            if value is not None and not all(map(fits, value if isinstance(value, list | tuple) else [value])):
                raise UserError(f"{name} is {value}: {requirement}")


def idle(config: TrainConfig, defaults: TrainConfig | None = None) -> dict[str, str]:
    """The settings that are given (are not `defaults`) and change nothing, with what each of them is for."""
    values, known = (dict(leaves(to_dict(one))) for one in (config, defaults or TrainConfig()))
    return {name: what for name, what in unused(values).items() if values[name] != known[name]}


def refuse_idle(config: TrainConfig, defaults: TrainConfig | None = None) -> None:
    """Raise UserError for a setting that is given (is not `defaults`) and changes nothing."""
    for name, needed in idle(config, defaults).items():
        value = dict(leaves(to_dict(config)))[name]
        raise UserError(f"{name} is {value} and would change nothing: give {needed}, or leave it out")


def without_idle(config: TrainConfig, kept: Container[str] = ()) -> TrainConfig:
    """A copy in which settings that change nothing, but for those `kept`, are the defaults."""
    defaults, changes = to_dict(TrainConfig()), dict[str, dict[str, Any]]()
    for part, _, name in (idle_name.partition(".") for idle_name in idle(config) if idle_name not in kept):
        changes.setdefault(part, {})[name] = defaults[part][name]
    return from_dict(changes, config)


def sees_all_depths(parallel: ParallelConfig) -> bool:
    """Return whether each process has all layers and all tokens, so that magnitudes by depth can be measured."""
    return max(parallel.pp, parallel.tp, parallel.cp) == 1


def fitted(config: TrainConfig, world_size: int = 1) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with defaults replaced where they would refuse what was given, and a sentence for each.

    A field counts as given if it is not the default, as in `idle`. A value that was given is left as it is: if it does
    not fit, `check` or the layout refuses it. Raises UserError for numbers that nothing could be fitted to.
    """
    from_dict(dataclasses.asdict(config))  # which refuses values of a wrong type
    _check_bounds(config)
    usual, notes = TrainConfig(), list[str]()

    def changed(part: str, why: str, **values: Any) -> None:
        nonlocal config
        config = from_dict({part: values} if part else values, config)
        notes.extend(f"{part}{'.' if part else ''}{name} is {value}: {why}" for name, value in values.items())

    if world_size > 1 and config.parallel == usual.parallel:
        changed("parallel", f"torchrun started {world_size} processes, each trains a copy", dp=world_size)
    if config.parallel.pp > 1:
        _fit_stages(config, usual, _copies(config.parallel, world_size), changed)
    if not sees_all_depths(config.parallel) and config.depth_every == usual.depth_every:
        notes.append(
            f"magnitudes and gradients by depth are not measured (depth_every {config.depth_every}): with pp, tp or cp "
            "no process has all layers and tokens"
        )
    shares = config.accumulation * _copies(config.parallel, world_size)
    if config.batch_size == usual.batch_size and config.batch_size % shares:
        size = math.ceil(config.batch_size / shares) * shares
        changed("", f"the default, {usual.batch_size}, does not divide into {shares} micro-batches", batch_size=size)
    if config.finetune.init_from is not None and config.data.seq_len == usual.data.seq_len:
        from attnres.models import open_checkpoint

        longest = getattr(open_checkpoint(config.finetune.init_from).config, "max_position_embeddings", None)
        if longest is not None and longest < config.data.seq_len:
            changed("data", f"{config.finetune.init_from} takes no longer sequences", seq_len=longest)
    optim = config.optim
    if optim.schedule == "wsd" and optim.warmup + optim.decay > 1:
        for name, other in (("warmup", "decay"), ("decay", "warmup")):
            if getattr(optim, name) == getattr(usual.optim, name) and getattr(optim, other) <= 1:
                rest = 1 - getattr(optim, other)
                changed("optim", f"optim.{other} is {getattr(optim, other)} of the run", **{name: rest})
                break
    return config, notes


def _fit_stages(config: TrainConfig, usual: TrainConfig, copies: int, changed: Callable[..., None]) -> None:
    """Change defaults that do not fit a pipeline, of which there are so many copies: its stages a process, its
    schedule, micro-batches, kind of loss."""
    from attnres.scale.pipeline import fitting_microbatches, schedule_named, stages_each

    parallel = config.parallel
    schedule, virtual, stages = parallel.pp_schedule, parallel.pp_virtual, len(parallel.pp_layers or ())
    if virtual is None and stages > parallel.pp and stages % parallel.pp == 0:
        virtual = stages // parallel.pp
        if virtual != stages_each(schedule):
            changed("parallel", f"pp_layers has {stages} stages for {parallel.pp} processes", pp_virtual=virtual)
    if schedule == usual.parallel.pp_schedule and (virtual or 1) > 1:
        schedule = "interleaved"
        changed("parallel", f"a process has {virtual} stages", pp_schedule=schedule)
    if config.accumulation == usual.accumulation:
        each = virtual or stages_each(schedule)
        count = fitting_microbatches(schedule, parallel.pp, each, divides=config.batch_size // copies)
        if count > config.accumulation:
            changed("", f"the schedule {schedule} needs micro-batches", accumulation=count)
    if schedule_named(schedule).apart and config.loss == usual.loss:
        changed("", f"the schedule {schedule} needs all logits of a micro-batch", loss="whole")


def _copies(parallel: ParallelConfig, world_size: int) -> int:
    """Return into how many shares a batch is divided."""
    return max(1, world_size // (parallel.pp * parallel.tp * parallel.cp))


def shares_of(config: TrainConfig, world_size: int) -> int:
    """Into how many shares a batch is divided: the processes over those that work on one share together.

    Raises:
        UserError: a number of processes that the table `parallel` does not make.
    """
    parallel = config.parallel
    together = parallel.pp * parallel.shard * parallel.tp * parallel.cp * (parallel.dp or 1)
    fits = world_size == together if parallel.dp else world_size % together == 0
    if not fits:
        table = " x ".join(f"{name} {getattr(parallel, name) or 'any'}" for name in ("dp", "shard", "pp", "tp", "cp"))
        raise UserError(
            f"parallel has {table} and there are {world_size} processes: start "
            f"{together if parallel.dp else f'a multiple of {together}'} with torchrun --nproc-per-node, or change the "
            "table"
        )
    return _copies(parallel, world_size)
