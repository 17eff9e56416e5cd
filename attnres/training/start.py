"""Where a run's first weights come from: drawn for a size, or a pretrained model with the wanted residual.

A plain Hugging Face model is converted in memory (`attnres.models.convert`). A model of attnres is continued as it is,
or, if its residual is `standard`, gets the wanted one. What was done is written to start.json in the run folder:

    init_from   as it was given
    kind        "plain" (a Hugging Face model), "attnres" or "foreign" (another project's depth reads)
    residual    of that model; null for a plain one
    settings    of its residual
    crc32       of its weights (parameters' names and bytes, in fp32)
    logits      how far the first logits are from its own on a fixed batch (see `attnres.models.exactness`): "largest"
                difference, "scale" (largest logit), "relative" (their ratio), "bound" (what counts as rounding),
                "tokens"; null where the model is continued as it is
    trainable   number of parameters that the run trains
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnres.data.shards import prepared_folder
from attnres.errors import UserError, foreign
from attnres.files import user_path
from attnres.head import evaluating
from attnres.residuals import Residual, make_residual, residual_class, settings_of
from attnres.training.config import ModelConfig, TrainConfig, size_or_default, tokenizer_or_default
from attnres.training.environment import tune
from attnres.training.objective import Teacher
from attnres.training.optim import carry_start, kinds

if TYPE_CHECKING:
    from attnres.data import Prepared
    from attnres.models import Checkpoint

NAMES = ("tokenizer.json", "tokenizer_config.json")


_CHECKED = set[Path]()
"""Folders of plain models whose files were looked through in this process: that is slow."""


def find_start(init_from: str) -> "Checkpoint":
    """Look at the model that a run starts from. No weight is read.

    Raises:
        UserError: nothing there, an unfinished run, or a model that cannot be used.
    """
    from attnres.models import open_checkpoint
    from attnres.models.convert import check_source

    start = open_checkpoint(init_from)
    if start.code:
        raise UserError(
            f"{init_from} brings its own code, which training does not run: start from a model that needs none"
        )
    if start.kind == "plain" and start.folder not in _CHECKED:
        check_source(start)
        _CHECKED.add(start.folder)
    return start


def has_reads(start: "Checkpoint") -> bool:
    """Whether it has depth reads, or another residual than the plain standard one, which can only be kept."""
    return start.residual is not None and (start.residual != "standard" or bool(start.settings))


# ------------------------------------------------------------------ what it settles


def settle(config: TrainConfig) -> TrainConfig:
    """A copy of `config` with what the model of `init_from` settles filled in: settings of the residual, the tokenizer,
    the rate of the residual's own parameters.

    Without `init_from` nothing is filled in. A converted model gets `read_scale="sum"` unless the settings say
    otherwise, which is what keeps its logits; one that is continued keeps its settings. Where no tokenizer is named
    the model's is taken; where no `residual_lr` is given it is `lr`.

    Raises:
        UserError: no such size, a size besides `init_from`, or another residual or setting than the model can have.
    """
    name, model = config.finetune.init_from, config.model
    if name is None:
        from attnres.models.build import check_size

        check_size(size_or_default(model))
        return config
    if model.size is not None:
        raise UserError(
            f"both size {_named(model.size)} and init_from {name} are given: the model has its size, leave size out"
        )
    start = find_start(name)
    if has_reads(start):
        settings = _kept_settings(start, model)
    else:
        exact = {"read_scale": "sum"} if "read_scale" in settings_of(model.residual) else {}
        settings = {**exact, **model.settings}
    data = config.data
    prepared = prepared_folder(data.source) is not None
    if data.tokenizer is None:
        theirs = str(start.folder) if user_path(name).exists() else name  # of the hub: where it is cached is no name
        data = dataclasses.replace(data, tokenizer=tokenizer_or_default(data) if prepared else theirs)
    optim = config.optim
    if optim.residual_lr is None:
        optim = dataclasses.replace(optim, residual_lr=optim.lr)
    return dataclasses.replace(config, model=dataclasses.replace(model, settings=settings), data=data, optim=optim)


def _named(size: str | dict[str, Any]) -> str:
    return size if isinstance(size, str) else json.dumps(size)


def _kept_settings(start: "Checkpoint", model: ModelConfig) -> dict[str, Any]:
    if model.residual != start.residual:
        raise UserError(
            f"{start.name} has the residual '{start.residual}' and '{model.residual}' was asked for: give residual "
            f"{start.residual}, or start from a plain or standard model, which any residual can be put on"
        )
    theirs = {**settings_of(model.residual), **start.settings}
    for name, value in model.settings.items():
        if name in theirs and theirs[name] != value:
            raise UserError(
                f"{name} is {value!r} and {start.name} was made with {theirs[name]!r}: leave it out to continue the "
                "model as it is, or start from a plain or standard one"
            )
    return {**start.settings, **{name: value for name, value in model.settings.items() if name not in theirs}}


def check_model(config: TrainConfig) -> None:
    """Refuse with a UserError, before text is read, settings that the residual or the model refuses, and a mechanism of
    the user's own that fails in a small model; no weight is read or drawn."""
    layers = _layers_of_start(config) if config.finetune.init_from is not None else _layers_of_new(config)
    if config.model.residual_file is not None and layers is not None:
        from attnres.models.check import refuse_failing

        refuse_failing(config.model.residual, layers, config.model.settings)


def _layers_of_start(config: TrainConfig) -> int | None:
    """Layers of the model that a run starts from; None where its config alone does not tell: it shows when the model is
    loaded. Raises UserError."""
    assert config.finetune.init_from is not None
    described = find_start(config.finetune.init_from).config
    try:
        layers, width = described.num_hidden_layers, described.hidden_size
    except AttributeError:
        return None
    from attnres.models.families import FAMILIES

    family = getattr(described, "family", None) or FAMILIES.get(described.model_type)
    if family is not None:
        settings: dict[str, Any] = config.model.settings
        depth = layers * len(family.sublayers)
        with torch.device("meta"):
            make_residual(config.model.residual, depth, width, sublayers=family.sublayers, **settings)
    return layers


def _layers_of_new(config: TrainConfig) -> int:
    """Layers of a new model, which is built of shapes. Raises UserError."""
    from attnres.models import build

    with torch.device("meta"):
        model: Any = build(
            size=size_or_default(config.model),
            residual=config.model.residual,
            vocab_size=256,
            max_positions=config.data.seq_len,
            settings=config.model.settings,
        )
    return model.config.num_hidden_layers


# ------------------------------------------------------------------ the model


def first_model(config: TrainConfig, prepared: "Prepared") -> tuple[Any, dict[str, Any] | None]:
    """The model that a run begins with, fp32, and what start.json says of it (None for a new one).

    Raises:
        UserError: sizes or settings that are impossible, a model that cannot be loaded or converted, whose logits the
            residual would change (without `inexact`), or that does not fit the data.
    """
    if config.finetune.init_from is None:
        return _new(config, prepared), None
    start = find_start(config.finetune.init_from)
    check_tokenizer(start, prepared)
    source: Any = start.load("fp32")
    _check_fit(start, source, config, prepared)
    record: dict[str, Any] = {
        "init_from": start.name,
        "kind": start.kind,
        "residual": start.residual,
        "settings": start.settings,
        "crc32": weights_crc32(source),
        "logits": None,
    }
    if (start.residual, start.settings) == (config.model.residual, config.model.settings):
        if residual_class(config.model.residual).set_progress is not Residual.set_progress:
            raise UserError(
                f"{start.name} has residual '{start.residual}', which is annealed over a run's steps: going on from it "
                "would anneal it again from the start; train it for as many steps as it is to have from a new model"
            )
        source.config.residual_settings = dict(config.model.settings)
        return source, record
    model = _with_residual(source, config)
    record["logits"] = _measured(source, model, start, config)
    if (start.folder / "generation_config.json").is_file():  # copied at the end; Transformers writes not all it reads
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig()
    return model, record


def weights_crc32(model: Any) -> int:
    """Of the names and bytes of the parameters, as in a checkpoint."""
    from attnres.training.checkpoint import checksum

    return checksum(model.named_parameters())


def kept_files(config: TrainConfig, prepared: "Prepared") -> dict[str, Path]:
    """Files that go beside the model, by name: the tokenizer, and what else came with the pretrained model, which is
    opened for it. They may be there or not."""
    files = {name: prepared.path / name for name in NAMES}
    if config.finetune.init_from is not None:
        files |= find_start(config.finetune.init_from).files_beside()
    return files


def _new(config: TrainConfig, prepared: "Prepared") -> Any:
    """A new model for the data: same seed, same shared weights, whatever the residual.

    Raises:
        UserError: a size that makes no model, or one whose parts do not fit together when it runs.
    """
    from attnres.models import build

    model = build(
        size=size_or_default(config.model),
        residual=config.model.residual,
        vocab_size=prepared.vocab_size,
        max_positions=config.data.seq_len,
        seed=config.seed,
        settings=config.model.settings,
    )
    carry_start(model, config.optim.base_width, kinds(model))
    for described in (model.config, model.generation_config):
        if described is not None:
            described.bos_token_id = described.eos_token_id = prepared.eos_id
    trial = foreign(
        f"a model of the size {_named(size_or_default(config.model))} does not run", "change the fields of the size"
    )
    with trial, evaluating(model), torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return model


def _with_residual(source: Any, config: TrainConfig) -> Any:
    """`source`, plain or standard, with the residual of the configuration; its other weights are copies."""
    from attnres.models import DepthMixin, convert

    standard: Any = source if isinstance(source, DepthMixin) else convert(source, "standard")
    if config.model.residual == "standard" and not config.model.settings:
        return standard
    new_config = copy.deepcopy(standard.config)
    new_config.residual, new_config.residual_settings = config.model.residual, dict(config.model.settings)
    new_config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        model = type(standard)(new_config)
    result = model.load_state_dict(standard.state_dict(), strict=False)
    strange = [name for name in result.missing_keys if ".residual." not in name] + result.unexpected_keys
    if strange:
        raise UserError(
            f"{config.finetune.init_from} has no weights for '{strange[0]}' of {type(model).__name__}: convert it with "
            "attnres convert and start from that"
        )
    return model.eval()


def _measured(source: Any, model: Any, start: "Checkpoint", config: TrainConfig) -> dict[str, Any]:
    """How far the logits moved; UserError where that is more than rounding and was not allowed."""
    from attnres.models.exactness import compare_logits

    difference = compare_logits(source, model)
    if not difference.within and not config.finetune.inexact:
        mean = model.config.residual_settings.get("read_scale") == "mean"
        mixes = mean or not residual_class(config.model.residual).traits.starts_standard
        advice = "choose block or full with read_scale 'sum'" if mixes else "leave out the settings that do"
        raise UserError(
            f"residual '{config.model.residual}' {json.dumps(config.model.settings)} changes the logits of "
            f"{start.name} by {difference.largest:.2g} of {difference.scale:.3g}, so that training would start from "
            f"another function: {advice}, or give --inexact"
        )
    names = ("largest", "scale", "relative", "bound", "tokens")
    return {name: getattr(difference, name) for name in names}


def load_teacher(config: TrainConfig, record: dict[str, Any], device: torch.device) -> Teacher | None:
    """The teacher of a run, None where it has none; `record` is the run's start.json.

    Raises:
        UserError: the model is no longer the one that the run started from.
    """
    settings = config.finetune
    if settings.init_from is None or not settings.distill_weight:
        return None
    model = find_start(settings.init_from).load("fp32")
    if weights_crc32(model) != record.get("crc32"):
        raise UserError(
            f"{settings.init_from} has changed since the run started from it, and it is the teacher: restore it, or "
            "start a new run in another folder"
        )
    model.requires_grad_(False)
    tune(model, device, config.data.seq_len)
    return Teacher(model.to(device).eval(), settings.distill_weight, settings.distill_temperature)


# ------------------------------------------------------------------ whether it fits the data


def check_tokenizer(start: "Checkpoint", prepared: "Prepared") -> None:
    """Refuse tokens that another tokenizer made than the model's: it would read them as other words.

    What counts is what makes ids out of text: vocabulary and merges, added tokens, normalisation and splitting.
    """
    from attnres.data import load_tokenizer

    ours, theirs = (_makes_ids(load_tokenizer(folder)) for folder in (prepared.path, start.folder))
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        raise UserError(
            f"the tokens in {prepared.path} were made by another tokenizer than that of {start.name} (they differ in "
            f"{different[0]}): prepare the text with --tokenizer {start.folder}"
        )


def _makes_ids(tokenizer: Any) -> dict[str, Any]:
    parts = json.loads(tokenizer.to_str())
    return {name: parts.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}


def _check_fit(start: "Checkpoint", model: Any, config: TrainConfig, prepared: "Prepared") -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if prepared.vocab_size > rows:
        raise UserError(
            f"the tokenizer of {start.name} has ids up to {prepared.vocab_size - 1} and its embedding {rows} rows: "
            "they belong to different models, or it has no end-of-text token and one was added"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest:
        raise UserError(
            f"data.seq_len is {config.data.seq_len} and {start.name} was made for at most {longest} tokens: give "
            f"--seq-len {longest} or less"
        )
