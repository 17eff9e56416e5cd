"""Prepare a training run: fill in defaults, and refuse configurations that cannot run.

Everything here happens before text is read, weights are initialised or a file is written. Torch is not imported at the
top.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres.errors import UserError, unknown
from attnres.files import user_path
from attnres.text import run_name
from attnres.training.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    from_dict,
    merged_settings,
    size_or_default,
    to_dict,
    tokenizer_or_default,
    unused,
)
from attnres.typed import leaves

if TYPE_CHECKING:
    from attnres.models import Checkpoint


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Attributes:
        config: the configuration with every default filled in.
        notes: a sentence for each default that was changed to suit the given options.
        start: the model of `finetune.init_from`, opened once for the whole run. None for a new model.
    """

    config: TrainConfig
    notes: tuple[str, ...] = ()
    start: "Checkpoint | None" = None


def prepare_run(config: TrainConfig, world_size: int = 1, start: "Checkpoint | None" = None) -> PreparedRun:
    """Return the run that a configuration describes, on `world_size` processes.

    A mechanism in a user's file is imported and registered under its name. A converted model gets `read_scale="sum"`
    unless the settings say otherwise, which keeps its logits. A continued model keeps its settings, its tokenizer, and
    one learning rate for all parameters.

    Args:
        start: the model of `finetune.init_from`, if it is already open.

    Raises:
        UserError: a value that is impossible, has no effect, or does not fit the model, the layout or the processes.
    """
    from attnres.residuals import settings_in_full
    from attnres.training.start import check_shapes, open_start

    from_dict(dataclasses.asdict(config))  # raises for values of a wrong type
    _check_bounds(dict(leaves(to_dict(config))))
    name, init_from = config.name, config.finetune.init_from
    model = _named_residual(config.model)
    if name is None:
        name = run_name(model.residual, config.seed)
    if name in ("", ".", "..") or name != Path(name).name:
        raise UserError(f"name is '{name}': expected a plain name, without folders; --out gives the run's folder")
    out = str(user_path(config.out if config.out is not None else Path("runs") / name))
    config = dataclasses.replace(config, name=name, out=out)

    optim = config.optim
    if init_from is None:
        from attnres.models.build import check_size

        check_size(size_or_default(model))
        model = dataclasses.replace(model, size=size_or_default(model))
        data = dataclasses.replace(config.data, tokenizer=tokenizer_or_default(config.data))
    else:
        if model.size is not None:
            size = model.size if isinstance(model.size, str) else json.dumps(model.size)
            raise UserError(
                f"both size {size} and init_from {init_from} are given: the model has a size already, leave size out"
            )
        start = start or open_start(init_from)
        model = dataclasses.replace(model, settings=_settings_on(start, model))
        data = _tokenized_for(start, config.data)
        if optim.residual_lr is None:
            optim = dataclasses.replace(optim, residual_lr=optim.lr)
    model = dataclasses.replace(model, settings=settings_in_full(model.residual, model.settings))
    config = dataclasses.replace(config, model=model, data=data, optim=optim)

    config, notes = _fit_defaults(config, world_size, start)
    check(config, world_size)
    check_shapes(start, config.model, config.data.seq_len)
    return PreparedRun(config, tuple(notes), start)


# ------------------------------------------------------------------ filling in


def _named_residual(model: ModelConfig) -> ModelConfig:
    """Return the model configuration with its mechanism by name, the file it came from, and all settings in one
    mapping."""
    from attnres.residuals import residual_class, source_file, source_sha256

    mechanism = residual_class(model.residual, model.residual_file)
    file, content = source_file(mechanism.name), source_sha256(mechanism.name)
    if model.residual_file == file and model.residual_sha256 not in (None, content):
        raise UserError(
            f"{file} has changed since this configuration was written (model.residual_sha256): restore the file, or "
            "take that line out of the configuration"
        )
    return dataclasses.replace(
        model,
        residual=mechanism.name,
        residual_file=file,
        residual_sha256=content,
        settings=merged_settings(model),
        block_size=None,
        num_blocks=None,
    )


def _settings_on(start: "Checkpoint", model: ModelConfig) -> dict[str, Any]:
    """Return the residual's settings for the model that a run starts from. Raises UserError if the model has others."""
    from attnres.residuals import settings_of
    from attnres.training.start import has_reads

    if not has_reads(start):
        # Reads that sum their sources keep the logits of a standard model; reads that average them do not.
        exact = {"read_scale": "sum"} if "read_scale" in settings_of(model.residual) else {}
        return {**exact, **model.settings}
    if model.residual != start.residual:
        raise UserError(
            f"{start.name} has the residual '{start.residual}' and '{model.residual}' was asked for: give residual "
            f"{start.residual}, or start from a plain or standard model, which can get any residual"
        )
    start_settings = {**settings_of(model.residual), **start.settings}
    for name, value in model.settings.items():
        if name in start_settings and start_settings[name] != value:
            raise UserError(
                f"{name} is {value!r} and {start.name} was made with {start_settings[name]!r}: leave it out to "
                "continue the model as it is, or start from a plain or standard one"
            )
    return {**start.settings, **{name: value for name, value in model.settings.items() if name not in start_settings}}


def _tokenized_for(start: "Checkpoint", data: DataConfig) -> DataConfig:
    """Return the data configuration with the start model's tokenizer, unless another is given or the source is
    prepared."""
    from attnres.data.shards import prepared_folder

    if data.tokenizer is not None:
        return data
    if prepared_folder(data.source) is not None:
        return dataclasses.replace(data, tokenizer=tokenizer_or_default(data))
    # A model on the hub is named by its hub name, since the cache folder differs between machines.
    return dataclasses.replace(data, tokenizer=str(start.folder) if user_path(start.name).exists() else start.name)


def _fit_defaults(config: TrainConfig, world_size: int, start: "Checkpoint | None") -> tuple[TrainConfig, list[str]]:
    """Return the configuration with defaults changed that do not fit the given options, and a sentence for each.

    A field counts as given if it differs from the default, as in `idle`. Given values never change: if one does not
    fit, `check` refuses it. Raises UserError for numbers that no default fits.
    """
    usual, notes = TrainConfig(), list[str]()

    def changed(part: str, why: str, **values: Any) -> None:
        nonlocal config
        config = from_dict({part: values} if part else values, config)
        notes.extend(f"{part}{'.' if part else ''}{name} is {value}: {why}" for name, value in values.items())

    if world_size > 1 and config.parallel == usual.parallel:
        changed("parallel", f"torchrun started {world_size} processes, each trains a copy", dp=world_size)
    ep = config.parallel.ep
    if ep > 1 and config.parallel.shard == usual.parallel.shard and world_size % (ep * config.parallel.pp) == 0:
        changed("parallel", f"experts are distributed over {ep} processes of shard", shard=ep)
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
    if start is not None and config.data.seq_len == usual.data.seq_len:
        longest = getattr(start.config, "max_position_embeddings", None)
        if longest is not None and longest < config.data.seq_len:
            changed("data", f"{start.name} takes no longer sequences", seq_len=longest)
    optim = config.optim
    if optim.schedule == "wsd" and optim.warmup + optim.decay > 1:
        for name, partner in (("warmup", "decay"), ("decay", "warmup")):
            if getattr(optim, name) == getattr(usual.optim, name) and getattr(optim, partner) <= 1:
                rest = 1 - getattr(optim, partner)
                changed("optim", f"optim.{partner} is {getattr(optim, partner)} of the run", **{name: rest})
                break
    return config, notes


def _fit_stages(config: TrainConfig, usual: TrainConfig, copies: int, changed: Callable[..., None]) -> None:
    """Change defaults that do not fit a pipeline with `copies` replicas: its stages a process, schedule, micro-batches,
    and kind of loss."""
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


# ------------------------------------------------------------------ refusing


BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "it must be a number above 0",
        lambda value: 0 < value < math.inf,
        "steps batch_size accumulation parallel.dp parallel.shard parallel.pp parallel.pp_virtual "
        "parallel.tp parallel.cp parallel.ep keep_at val_every log_every save_every data.seq_len data.val_windows "
        "data.limit optim.lr optim.muon_lr optim.residual_lr optim.base_width finetune.lora_rank finetune.lora_alpha "
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
        "optim.min_lr_ratio optim.warmup optim.decay finetune.distill_weight",
    ),
    ("decay rates lie from 0 to below 1", lambda value: 0 <= value < 1, "optim.betas optim.momentum"),
    ("it is the fraction of documents held out, between 0 and 1", lambda value: 0 < value < 1, "data.held_out"),
)
"""Bounds of numbers, each with a message and the fields that it applies to if they are given."""


def check(config: TrainConfig, world_size: int = 1) -> None:
    """Raise UserError for a configuration that cannot run on `world_size` processes.

    `start.check_shapes` checks the residual's settings, once the model's depth is known.
    """
    from attnres.models.build import SIZES
    from attnres.residuals import check_settings, residual_class

    from_dict(dataclasses.asdict(config))  # raises for values of a wrong type
    if isinstance(config.model.size, str) and config.model.size not in SIZES:
        raise unknown("size", config.model.size, SIZES)
    mechanism = residual_class(config.model.residual, config.model.residual_file)
    check_settings(mechanism.name, merged_settings(config.model))
    optim, finetune = config.optim, config.finetune
    from attnres.ops.devices import KERNELS

    if config.device.split(":")[0] not in ("auto", *KERNELS):
        raise unknown("device", config.device, ("auto", *KERNELS))
    _check_bounds(dict(leaves(to_dict(config))))
    if config.keep_at and max(config.keep_at) > config.steps:
        raise UserError(
            f"keep_at is {list(config.keep_at)}: the run has {config.steps} steps, give some from 1 to {config.steps}"
        )
    if config.seed > 2**32 - world_size:  # NumPy's limit; each process adds its rank to the seed
        raise UserError(f"seed is {config.seed}: it must be at most {2**32 - world_size}")
    for name in ("train_only", "distill_weight", "inexact"):
        if finetune.init_from is None and getattr(finetune, name) not in ("all", 0, False):
            raise UserError(
                f"finetune.{name} is {getattr(finetune, name)} and the model is new: give init_from, the pretrained "
                "model it is about"
            )
    refuse_idle(config)
    _refuse_layout(config)
    if optim.balance != "none" and finetune.train_only != "all":
        raise UserError(
            f"optim.balance is {optim.balance} and finetune.train_only is {finetune.train_only}: routers are frozen, "
            "and their biases with them; leave balance out"
        )
    if finetune.init_from is not None and optim.base_width is not None:
        raise UserError(
            f"optim.base_width is {optim.base_width} and the model is {finetune.init_from}: it transfers learning "
            "rates and start values to new models only, leave it out"
        )
    if optim.schedule == "wsd" and optim.warmup + optim.decay > 1:
        raise UserError(
            f"optim.warmup {optim.warmup} and optim.decay {optim.decay} together exceed the run: "
            "they are fractions of the steps, make their sum at most 1"
        )
    copies = batch_shares(config.parallel, world_size)
    shares = config.accumulation * copies
    if config.batch_size % shares:
        processes = f" x {copies} processes" if copies > 1 else ""
        below = config.batch_size // shares * shares
        near = f"{below} or {below + shares}" if below else f"{shares}"
        raise UserError(
            f"batch_size {config.batch_size} does not divide into accumulation {config.accumulation}{processes}: "
            f"use a multiple of {shares}, e.g. {near}"
        )


def _check_bounds(values: Mapping[str, Any]) -> None:
    """Raise UserError for a number outside its bounds; `values` are all fields by dotted names."""
    for requirement, fits, names in BOUNDS:
        for name in names.split():
            value = values[name]
            if value is not None and not all(map(fits, value if isinstance(value, list | tuple) else [value])):
                raise UserError(f"{name} is {value}: {requirement}")


def _refuse_layout(config: TrainConfig) -> None:
    """Raise UserError for options that the `parallel` section cannot be combined with."""
    finetune, parallel, usual = config.finetune, config.parallel, ParallelConfig()
    for name in ("pp_schedule", "pp_virtual", "pp_layers"):
        if parallel.pp == 1 and getattr(parallel, name) != getattr(usual, name):
            raise UserError(
                f"parallel.{name} is {getattr(parallel, name)} and the layers are not cut into stages: give pp, or "
                "leave it out"
            )
    cuts = [name for name in ("pp", "tp", "cp") if getattr(parallel, name) > 1]
    if config.optim.balance != "none" and cuts:
        raise UserError(
            f"optim.balance is {config.optim.balance} and parallel.{cuts[0]} above 1: loads are counted where every "
            "process has all layers and whole sequences, use dp and shard"
        )
    if parallel.ep > 1 and (sliced := [name for name in ("tp", "cp") if getattr(parallel, name) > 1]):
        raise UserError(
            f"parallel.ep and parallel.{sliced[0]} are above 1: tokens are sent to experts from whole sequences, use "
            "ep with dp, shard and pp"
        )
    if parallel.shard % parallel.ep:
        raise UserError(
            f"parallel.ep is {parallel.ep} and parallel.shard is {parallel.shard}: experts are distributed over "
            "processes of shard, give an ep that divides it"
        )
    if max(parallel.shard, parallel.pp, parallel.tp, parallel.cp) == 1:
        if parallel.async_save:
            raise UserError(
                "parallel.async_save is on and every process has the whole model: it needs shard, pp, tp or cp"
            )
        return
    if len(cuts) > 1:
        raise UserError(
            f"parallel.{' and parallel.'.join(cuts)} are above 1: only one of them can be used, give {cuts[-1]} with "
            "dp and shard"
        )
    table = cuts[0] if cuts else "shard"
    if finetune.train_only == "lora":
        raise UserError(f"train_only is lora and parallel.{table} above 1: adapters are small, train them with dp only")
    if config.compile and table in ("tp", "cp"):
        raise UserError(
            f"compile is on and parallel.{table} is {getattr(parallel, table)}: what is compiled may be sharded or cut "
            "into stages (shard, pp) alone. Use one of these, or leave compile out"
        )
    if table != "shard" and finetune.distill_weight:
        raise UserError(
            f"distill_weight is given and parallel.{table} above 1: a teacher cannot be split with the model, use dp "
            "and shard"
        )
    # A default was not chosen by the user: `_fit_defaults` notes that nothing is measured.
    if not sees_all_depths(parallel) and config.depth_every not in (0, TrainConfig().depth_every):
        raise UserError(
            f"depth_every is given and parallel.{table} above 1: no process has all layers of a model that is split "
            "into stages, or all tokens of a split sequence; give --depth-every 0"
        )
    if parallel.pp > 1:
        from attnres.scale.pipeline import check_schedule, schedule_named, stages_each

        virtual = parallel.pp_virtual or stages_each(parallel.pp_schedule)
        check_schedule(parallel.pp_schedule, parallel.pp, virtual, config.accumulation)
        option = "compile is on" if config.compile else f"parallel.ep is {parallel.ep}" if parallel.ep > 1 else None
        if option and schedule_named(parallel.pp_schedule).apart:
            raise UserError(
                f"{option} and parallel.pp_schedule is {parallel.pp_schedule}, which makes gradients of inputs and of "
                "weights apart: compiled layers and distributed experts make them at once. Choose 1f1b, interleaved or "
                "gpipe"
            )


def idle(config: TrainConfig, defaults: TrainConfig | None = None) -> dict[str, str]:
    """Return each setting that differs from `defaults` and has no effect, with the setting that it would need."""
    values, known = (dict(leaves(to_dict(one))) for one in (config, defaults or TrainConfig()))
    return {name: what for name, what in unused(values).items() if values[name] != known[name]}


def refuse_idle(config: TrainConfig, defaults: TrainConfig | None = None) -> None:
    """Raise UserError for a given setting (one that differs from `defaults`) without effect."""
    for name, needed in idle(config, defaults).items():
        value = dict(leaves(to_dict(config)))[name]
        raise UserError(f"{name} is {value} and would have no effect: give {needed}, or leave it out")


def without_idle(config: TrainConfig, kept: Container[str] = ()) -> TrainConfig:
    """Return a copy in which settings without effect, except those in `kept`, have their defaults."""
    defaults, changes = to_dict(TrainConfig()), dict[str, dict[str, Any]]()
    for part, _, name in (idle_name.partition(".") for idle_name in idle(config) if idle_name not in kept):
        changes.setdefault(part, {})[name] = defaults[part][name]
    return from_dict(changes, config)


def sees_all_depths(parallel: ParallelConfig) -> bool:
    """Return whether each process has all layers and all tokens, so that magnitudes by depth can be measured."""
    return max(parallel.pp, parallel.tp, parallel.cp) == 1


def _copies(parallel: ParallelConfig, world_size: int) -> int:
    """Return into how many parts a batch is divided."""
    return max(1, world_size // (parallel.pp * parallel.tp * parallel.cp))


def batch_shares(parallel: ParallelConfig, world_size: int) -> int:
    """Return into how many parts a batch is divided: the number of processes over those that work on one part together.

    Raises:
        UserError: the number of processes does not fit the `parallel` section.
    """
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
