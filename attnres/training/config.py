"""The configuration of a training run: dataclasses, their dict form, and when two of them are the same run.

The docstrings below the fields are the help texts of the command line (tyro reads them). No torch is imported here.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnres.errors import UserError
from attnres.typed import leaves, overlay

Setting = int | float | bool | str | None


@dataclass
class ModelConfig:
    """Which model is trained."""

    size: str | dict[str, Any] | None = None
    """Named size (a key of `attnres.models.build.SIZES`), or a mapping {family: qwen3, hidden_size: 64, ...}; none is
    nano, or with finetune.init_from the size of that model."""
    residual: str = "block"
    """How sublayers read earlier outputs: a mechanism's name, or FILE.py:CLASS for one of your own file."""
    residual_file: str | None = None
    """FILE.py:CLASS that the mechanism was read from: a record, which runs nothing."""
    residual_sha256: str | None = None
    """SHA-256 of that file's content: a run goes on with the same alone."""
    block_size: int | None = None
    """Sublayers (attention and MLP count apart) in a block of the block residual; give this or num_blocks."""
    num_blocks: int | None = None
    """Number of blocks of the block residual; give this or block_size."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Further settings of the residual by name, e.g. num_streams=4 for hyper_connections."""


@dataclass
class DataConfig:
    """What it is trained on."""

    source: str = "stdlib"
    """stdlib (Python's own sources), a file or folder (.txt, .md, .jsonl, .json, .csv, .parquet, .arrow, .py; text
    also as .gz or .zst), a pattern ('data/**/*.txt'), hub:NAME[:CONFIG[:SPLIT]] or task:NAME; see attnres
    prepare."""
    tokenizer: str | None = None
    """bpe:VOCAB trains a byte-level BPE on the training text; else a local tokenizer folder or a hub name; none is
    bpe:4096, or with finetune.init_from that of the model."""
    column: str = "text"
    """Field or column that holds the text, of rows."""
    seq_len: int = 256
    """Tokens in a training window."""
    held_out: float = 0.05
    """Fraction of the documents held out for validation."""
    limit: int | None = None
    """Read at most this many characters of the source; none reads all."""
    stream: bool = False
    """Read the source as far as steps ask for it, in its order, and not all of it before the first step: tokenizer and
    held-out windows are of its first limit characters (16.8 million if none is given)."""
    val_windows: int = 64
    """Held-out windows of seq_len tokens measured at each validation, the same ones every time."""


READ_RATE = 0.1
"""Default learning rate of queries and gains relative to AdamW's, if `residual_lr` is not given."""


@dataclass
class OptimConfig:
    """How it is optimised."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the weight matrices, each of an expert too, and AdamW for everything else."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    residual_lr: float | None = None
    """Peak learning rate of the residual's parameters. None is 0.1 x lr for the queries of depth reads, parameters that
    compute them and the gains of their keys (`Residual.slow`), and lr for the residual's other parameters; with
    finetune.init_from it is lr for all."""
    residual_decay: float = 0.0
    """Decoupled weight decay of the pseudo-queries, towards the uniform mean."""
    muon_lr: float = 2e-3
    """Peak learning rate of Muon, scaled per matrix so that an update has the RMS of an AdamW update."""
    base_width: int | None = None
    """Width of the model whose learning rates these are: the rates and start values of a new model of another width are
    scaled as in muP (docs/explanation/studies.md). None takes the rates as they are."""
    min_lr_ratio: float = 0.1
    """Last learning rate as a fraction of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """cosine, or wsd: warm-up, constant, then a linear decay over the last part."""
    warmup: float = 0.05
    """Warm-up as a fraction of the steps."""
    decay: float = 0.2
    """Length of wsd's decay as a fraction of the steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the weight matrices (nothing else is decayed)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's beta1 and beta2."""
    momentum: float = 0.95
    """Muon's momentum."""
    balance: Literal["none", "sign", "quantile"] = "none"
    """Keep experts evenly loaded by the bias of their router: sign moves it by 0.001 a step towards the mean load
    (DeepSeek-V3), quantile sets it from the step's scores (Kimi K3). The load of the fullest expert is logged."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass
class FinetuneConfig:
    """The model that a run starts from, and which of its parameters are trained."""

    init_from: str | None = None
    """Start from this model instead of a new one: a folder or hub name of a Hugging Face model, converted to
    model.residual; or a model or run folder of attnres. Replaces size, and brings its tokenizer."""
    inexact: bool = False
    """Start even if the residual changes the logits of the model it starts from (other layouts, biases, gates)."""
    train_only: Literal["all", "residual", "lora"] = "all"
    """all parameters; residual: the residual's own, the rest frozen; lora: those and low-rank changes (LoRA) of the
    layers' matrices."""
    lora_rank: int = 8
    """Rank of LoRA's matrices."""
    lora_alpha: float = 16.0
    """Scale of LoRA: its matrices' product is multiplied by lora_alpha / lora_rank."""
    distill_weight: float = 0.0
    """Weight w in the loss (1-w) cross-entropy + w T^2 KL(model at the start || this one)."""
    distill_temperature: float = 1.0
    """Temperature T of both distributions in the distillation loss."""


@dataclass
class ParallelConfig:
    """Distributed training: torchrun starts dp x shard x pp x tp x cp processes."""

    dp: int | None = None
    """Replicas of the model, each with its part of every batch (data parallel); none is the number of processes divided
    by the other sizes."""
    shard: int = 1
    """Processes over which every parameter, gradient and optimizer state is sharded (FSDP2; HSDP with dp)."""
    pp: int = 1
    """Pipeline stages: processes over which the layers are split; a step has `accumulation` micro-batches."""
    pp_schedule: Literal[
        "gpipe", "1f1b", "looped_bfs", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """Order in which a process runs its stages' micro-batches; all but gpipe and 1f1b have several stages a process."""
    pp_virtual: int | None = None
    """Stages of a process; none is 2 if the schedule has several, else 1."""
    pp_layers: tuple[int, ...] | None = None
    """Layers of each stage; none balances them by their multiplications (`attnres plan --measure`: by their times)."""
    tp: int = 1
    """Tensor parallel: processes over which the matrices of every layer (by Transformers' tp_plan) and the tokens of
    every sequence are split."""
    cp: int = 1
    """Context parallel: processes over which the tokens of every sequence are split, with unsplit matrices: keys and
    values are gathered."""
    ep: int = 1
    """Expert parallel: processes, of those of `shard`, over which the experts of a mixture are distributed; tokens are
    sent to their experts and back."""
    async_save: bool = False
    """Write checkpoints while training continues, from copies; training waits for one only before the next and at the
    end. For sharded, pipelined or tensor-parallel models."""


@dataclass
class TrainConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    out: str | None = None
    """Folder of the run; none is runs/NAME."""
    name: str | None = None
    """Name of the run in tables; none is RESIDUAL-seedSEED."""
    seed: int = 0
    """Seed of the initial weights and of the order of the batches."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences a step, over all processes and micro-batches."""
    accumulation: int = 1
    """Micro-batches of a step: less memory, the same mean over all tokens. With parallel.pp, 1 becomes as many as the
    schedule needs."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 is autocast over fp32 parameters; auto is bf16 where the device has it, else fp32."""
    stream_dtype: Literal["auto", "fp32", "bf16"] = "fp32"
    """bf16 keeps the residual stream in bf16 from the embedding on, which halves the bytes that reads move; its sums
    are rounded to bf16 after each sublayer. It needs dtype bf16. auto is bf16 where layers gather their parameters in
    bf16 (parallel.shard), else fp32."""
    device: str = "auto"
    """auto (CUDA where there is one, else the CPU), cpu or cuda."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graphs: bool = False
    """Capture forward, loss, backward, clipping and optimizers as CUDA graphs, so that the host launches a step with
    few calls; if that is impossible, steps are eager, and environment.json says why."""
    gradient_checkpointing: Literal["none", "layer", "sublayer", "reads"] = "none"
    """What is recomputed in the backward pass instead of stored: each layer, each attention and MLP (sublayer), or
    depth reads and parallel streams alone (reads), which saves the least memory and costs little time."""
    loss: Literal["auto", "whole", "chunked"] = "auto"
    """Compute the loss from all logits of a micro-batch (whole) or from few rows of them at a time (chunked); auto is
    whole up to 33 million logits (268 million on a GPU), else chunked."""
    val_every: int = 100
    """Steps between validations (there is always one at the end)."""
    log_every: int = 10
    """Steps between training lines in metrics.jsonl; each gives the mean loss since the one before."""
    depth_every: int = 100
    """Steps between measurements of magnitudes and gradients by depth; 0 turns them off. With pp, tp or cp there are
    none."""
    save_every: int = 500
    """Steps between checkpoints (there is always one at the end and on Ctrl-C)."""
    keep_at: tuple[int, ...] = ()
    """Steps whose checkpoints are kept in RUN/kept, for runs that branch off there."""
    resume: bool = False
    """Continue the run in the folder from its checkpoint, or start it if there is none. The result equals, bit for bit,
    that of an uninterrupted run (on CUDA if its kernels are deterministic), with the threads and kernels it began
    with."""
    allow_different: bool = False
    """Resume even if the device, versions or kernels differ from those the run began with, so that its numbers would
    differ."""
    track: Literal["none", "trackio", "wandb", "tensorboard"] = "none"
    """Also send the metrics to this tracker; metrics.jsonl is always written."""


# ------------------------------------------------------------------ defaults of a new model


def merged_settings(model: ModelConfig) -> dict[str, Setting]:
    """Return the residual's settings merged with the separate `block_size` and `num_blocks`, each given once or
    UserError; "standard" ignores those of "block"."""
    from attnres.residuals.registry import switched_settings

    settings = dict(model.settings)
    for name in ("block_size", "num_blocks"):
        value = getattr(model, name)
        if value is None:
            continue
        if settings.get(name) not in (None, value):
            raise UserError(
                f"model.{name} is {value} but model.settings gives {name} = {settings[name]}: give one of the two"
            )
        settings[name] = value
    return switched_settings(model.residual, settings)


def size_or_default(model: ModelConfig) -> str | dict[str, Any]:
    """Return the size of a new model."""
    return "nano" if model.size is None else model.size


def tokenizer_or_default(data: DataConfig) -> str:
    """Return the tokenizer to use if neither the configuration nor a pretrained model names one."""
    return "bpe:4096" if data.tokenizer is None else data.tokenizer


# ------------------------------------------------------------------ plain dicts and files


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return a nested plain dict for JSON; `from_dict` is the inverse.

    >>> to_dict(TrainConfig(steps=200))["steps"]
    200
    """
    values = dataclasses.asdict(config)
    values["optim"]["betas"], values["keep_at"] = list(values["optim"]["betas"]), list(values["keep_at"])
    return values


def from_dict(values: Mapping[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """Return the configuration `base` (by default the defaults) overridden by nested `values`.

    >>> from_dict({"steps": 200, "optim": {"lr": 0.002}}).optim.lr
    0.002

    A configuration of an earlier version may hold the default of an option that was removed.

    Raises:
        UserError: an unknown key, with the nearest valid one; a value of a wrong type, with the expected one; a removed
            value.
    """
    flat = dict(leaves(values))
    for name, (default, instead) in GONE.items():
        if flat.get(name, default) != default:
            raise UserError(f"{name} is {flat[name]}, a removed option: {instead}")
    if flat.get("loss") == "liger":
        raise UserError("loss is liger, which was removed: give chunked, which is a fused kernel on CUDA, or auto")
    known = dict(values)
    if isinstance(optim := values.get("optim"), Mapping):
        known["optim"] = {name: value for name, value in optim.items() if f"optim.{name}" not in GONE}
    return overlay(base or TrainConfig(), known)


# ------------------------------------------------------------------ a run and its resumption


def unused(values: Mapping[str, Any]) -> dict[str, str]:
    """Return each field without effect among these values (all fields, by dotted names), with the field that it would
    need."""
    needed = {
        "optimizer muon": (values["optim.optimizer"] == "muon", "optim.muon_lr", "optim.momentum"),
        "schedule wsd": (values["optim.schedule"] == "wsd", "optim.decay"),
        "train_only lora": (values["finetune.train_only"] == "lora", "finetune.lora_rank", "finetune.lora_alpha"),
        "a distill_weight above 0": (bool(values["finetune.distill_weight"]), "finetune.distill_temperature"),
    }
    return {name: what for what, (is_set, *names) in needed.items() if not is_set for name in names}


GONE = {
    "optim.residual_hold": (0.0, "it gained nothing in a comparison, leave it out"),
    "optim.residual_warmup": (0.0, "it gained nothing in a comparison, leave it out"),
}
"""Removed fields: the default that a stored configuration may hold, and what to do about another value."""
FREE = (
    *("out", "name", "resume", "track", "save_every", "keep_at", "device", "allow_different"),
    *("accumulation", "gradient_checkpointing", "loss", "cuda_graphs", "recompute_reads"),
)
"""Fields that may change when a run is resumed, as those of `parallel` may. Of these only `device`, `parallel`,
`accumulation`, `loss`, `gradient_checkpointing` and `cuda_graphs` change numbers, by rounding. `recompute_reads` was an
earlier version's `gradient_checkpointing` reads."""
_CONTENT = "model.residual_sha256"


def with_all_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `to_dict` form with every setting of its residual; earlier versions wrote only the given ones."""
    from attnres.residuals.registry import is_known, settings_in_full

    model = values.get("model", {})
    name = model.get("residual", ModelConfig.residual)
    if not is_known(name):
        return dict(values)
    return {**values, "model": {**model, "settings": settings_in_full(name, model.get("settings"))}}


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `to_dict` form that determine a run's result, by dotted name; fields that an earlier
    version lacked have their defaults."""
    gone = {name: default for name, (default, _) in GONE.items()}
    fields = {**gone, **dict(leaves(to_dict(TrainConfig()))), **dict(leaves(with_all_settings(values)))}
    return {name: value for name, value in fields.items() if name not in FREE and not name.startswith("parallel.")}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return dotted names of the fields in which two `to_dict` forms differ and which affect results."""
    left, right = deciding(ours), deciding(theirs)
    names = list(dict.fromkeys([*left, *right]))
    if None in (left.get(_CONTENT), right.get(_CONTENT)):  # earlier versions did not write it
        names = [name for name in names if name != _CONTENT]
    # earlier versions wrote a size with init_from, too
    if left.get("finetune.init_from") and right.get("finetune.init_from"):
        names = [name for name in names if name.split(".")[:2] != ["model", "size"]]
        if left["finetune.init_from"] in (left.get("data.tokenizer"), right.get("data.tokenizer")):
            # earlier versions wrote the path of the hub's cache; data.json identifies the tokenizer
            names.remove("data.tokenizer")
    neither = unused(left).keys() & unused(right).keys()
    differ = [name for name in names if left.get(name) != right.get(name) and name not in neither]
    return [name for name in differ if not any(name.startswith(f"{whole}.") for whole in differ)]


def same_configuration(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Refuse to continue a run with another configuration; the error names the fields that differ and both values."""
    changed = differences(ours, theirs)
    file = _at(ours, "model.residual_file")
    if "model.residual_sha256" in changed and file == _at(theirs, "model.residual_file"):
        raise UserError(
            f"{where} was made with another content of {file}: restore it or start a new run in another folder"
        )
    if changed:
        pairs = "; ".join(f"{name} is {_at(ours, name)!r} here, {_at(theirs, name)!r} there" for name in changed)
        raise UserError(
            f"{where} belongs to another configuration: {pairs}; use the same values or start a new run in "
            "another folder"
        )


def same_text(ours: dict[str, Any], theirs: Any, where: str) -> None:
    """Refuse to continue a run on other data than `theirs` (`attnres.training.data.data_record`). Raises UserError."""
    if ours != theirs:
        raise UserError(
            f"{where} was trained on other data: the text or the tokenizer of the same source has changed since; "
            "restore them or start a new run in another folder"
        )


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
