"""Make the model that a run starts from: a new one of a size, or a pretrained model with the wanted residual.

A plain Hugging Face model is converted in memory (`attnres.models.convert`). A model of attnres is continued with its
residual, or, if that is `standard`, gets the wanted one. start.json in the run folder records this:

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
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnres.errors import UserError, foreign
from attnres.head import evaluating
from attnres.residuals import Residual, changed_settings, make_residual, residual_class, settings_in_full
from attnres.training.checkpoint import checksum
from attnres.training.config import FinetuneConfig, ModelConfig, TrainConfig, size_or_default
from attnres.training.environment import tune
from attnres.training.objective import Teacher
from attnres.training.optim import carry_start, kinds

if TYPE_CHECKING:
    from attnres.data import Prepared
    from attnres.models import Checkpoint

NAMES = ("tokenizer.json", "tokenizer_config.json")


_CHECKED = set[Path]()
"""Folders of plain models whose files were checked in this process, because the check is slow."""


def open_start(init_from: str) -> "Checkpoint":
    """Open the model that a run starts from. No weight is read.

    Raises:
        UserError: nothing is there, the run is unfinished, or the model cannot be used.
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
    """Return whether the model has depth reads or another residual than the plain standard one; such a residual is
    kept."""
    return start.residual is not None and (start.residual != "standard" or bool(start.settings))


# ------------------------------------------------------------------ shapes alone


def check_shapes(start: "Checkpoint | None", model: ModelConfig, seq_len: int) -> None:
    """Raise UserError for settings that the residual or the model refuses, and for a mechanism in a user's file that
    fails in a small model. No weight is read or initialised.

    Args:
        start: the model to continue or convert; None for a new one, of the size in `model`.
    """
    layers = _layers_of_start(start, model) if start is not None else _layers_of_new(model, seq_len)
    if model.residual_file is not None and layers is not None:
        from attnres.models.check import refuse_failing

        refuse_failing(model.residual, layers, model.settings)


def _layers_of_start(start: "Checkpoint", model: ModelConfig) -> int | None:
    """Return the number of layers of the start model, after building its residual on the meta device; None if its
    config does not tell, since loading the model will. Raises UserError."""
    described = start.config
    try:
        layers, width = described.num_hidden_layers, described.hidden_size
    except AttributeError:
        return None
    from attnres.models.families import FAMILIES

    family = getattr(described, "family", None) or FAMILIES.get(described.model_type)
    if family is not None:
        settings: dict[str, Any] = model.settings
        depth = layers * len(family.sublayers)
        with torch.device("meta"):
            make_residual(model.residual, depth, width, sublayers=family.sublayers, **settings)
    return layers


def _layers_of_new(model: ModelConfig, seq_len: int) -> int:
    """Return the number of layers of a new model, built on the meta device. Raises UserError."""
    from attnres.models import build

    with torch.device("meta"):
        built: Any = build(
            size=size_or_default(model),
            residual=model.residual,
            vocab_size=256,
            max_positions=seq_len,
            settings=model.settings,
        )
    return built.config.num_hidden_layers


# ------------------------------------------------------------------ the model


def first_model(
    config: TrainConfig, start: "Checkpoint | None", prepared: "Prepared"
) -> tuple[Any, dict[str, Any] | None]:
    """Return the model that a run starts from, in fp32, and the content of start.json (None for a new model).

    Raises:
        UserError: impossible sizes or settings, a model that cannot be loaded or converted, one whose logits the
            residual would change (without `inexact`), or one that does not fit the data.
    """
    wanted, seq_len = config.model, config.data.seq_len
    if start is None:
        return _new(wanted, prepared, seq_len=seq_len, seed=config.seed, base_width=config.optim.base_width), None
    check_tokenizer(start, prepared)
    source: Any = start.load("fp32")
    _check_fit(start, source, seq_len, prepared)
    record: dict[str, Any] = {
        "init_from": start.name,
        "kind": start.kind,
        "residual": start.residual,
        "settings": start.settings,
        "crc32": checksum(source.named_parameters()),
        "logits": None,
    }
    wanted_settings = changed_settings(wanted.residual, wanted.settings)
    if (start.residual, start.settings) == (wanted.residual, wanted_settings):
        if residual_class(wanted.residual).set_progress is not Residual.set_progress:
            raise UserError(
                f"{start.name} has residual '{start.residual}', which is annealed over a run's steps: going on from it "
                "would anneal it again from the start; train it for as many steps as it is to have from a new model"
            )
        return source, record
    model = _with_residual(source, wanted, start)
    record["logits"] = _compare_logits(source, model, start, inexact=config.finetune.inexact)
    # copied at the end, because Transformers does not write all that it reads
    if (start.folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig()
    return model, record


def extra_files(start: "Checkpoint | None", prepared: "Prepared") -> dict[str, Path]:
    """Return the files to copy beside the model, by name: the tokenizer, and other files of the start model. Some may
    not exist."""
    files = {name: prepared.path / name for name in NAMES}
    return files if start is None else files | start.files_beside()


def _new(wanted: ModelConfig, prepared: "Prepared", *, seq_len: int, seed: int, base_width: int | None) -> Any:
    """Return a new model for the data; with the same seed all shared weights are equal, whatever the residual.

    Raises:
        UserError: a size that makes no valid model, or one that fails when it runs.
    """
    from attnres.models import build

    model = build(
        size=size_or_default(wanted),
        residual=wanted.residual,
        vocab_size=prepared.vocab_size,
        max_positions=seq_len,
        seed=seed,
        settings=changed_settings(wanted.residual, wanted.settings),
    )
    carry_start(model, base_width, kinds(model))
    for described in (model.config, model.generation_config):
        if described is not None:
            described.bos_token_id = described.eos_token_id = prepared.eos_id
    trial = foreign(
        f"a model of the size {json.dumps(size_or_default(wanted)).strip(chr(34))} does not run",
        "change the fields of the size",
    )
    with trial, evaluating(model), torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return model


def _with_residual(source: Any, wanted: ModelConfig, start: "Checkpoint") -> Any:
    """Return `source`, plain or standard, with the wanted residual; its other weights are copies."""
    from attnres.models import DepthMixin, convert

    standard: Any = source if isinstance(source, DepthMixin) else convert(source, "standard")
    settings = changed_settings(wanted.residual, wanted.settings)
    if wanted.residual == "standard" and not settings:
        return standard
    new_config = copy.deepcopy(standard.config)
    new_config.residual, new_config.residual_settings = wanted.residual, settings
    new_config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        model = type(standard)(new_config)
    result = model.load_state_dict(standard.state_dict(), strict=False)
    strange = [name for name in result.missing_keys if ".residual." not in name] + result.unexpected_keys
    if strange:
        raise UserError(
            f"{start.name} has no weights for '{strange[0]}' of {type(model).__name__}: convert it with "
            "attnres convert and start from that"
        )
    return model.eval()


def _compare_logits(source: Any, model: Any, start: "Checkpoint", *, inexact: bool) -> dict[str, Any]:
    """Return the difference of the logits. Raises UserError if it is more than rounding and `inexact` is False."""
    from attnres.models.exactness import compare_logits

    difference = compare_logits(source, model)
    if not difference.within and not inexact:
        residual, settings = model.config.residual, model.config.residual_settings
        averages = settings_in_full(residual, settings).get("read_scale") == "mean"
        mixes = averages or not residual_class(residual).traits.starts_standard
        advice = "choose block or full with read_scale 'sum'" if mixes else "leave out the settings that do"
        raise UserError(
            f"residual '{residual}' {json.dumps(settings)} changes the logits of "
            f"{start.name} by {difference.largest:.2g} of {difference.scale:.3g}, so training would start from "
            f"another function: {advice}, or give --inexact"
        )
    names = ("largest", "scale", "relative", "bound", "tokens")
    return {name: getattr(difference, name) for name in names}


def load_teacher(
    start: "Checkpoint | None", finetune: FinetuneConfig, record: dict[str, Any], device: torch.device, seq_len: int
) -> Teacher | None:
    """Return the teacher of a run, None if it has none; `record` is the run's start.json.

    Raises:
        UserError: the model is no longer the one that the run started from.
    """
    if start is None or not finetune.distill_weight:
        return None
    model = start.load("fp32")
    if checksum(model.named_parameters()) != record.get("crc32"):
        raise UserError(
            f"{start.name} has changed since the run started from it, and it is the teacher: restore it, or "
            "start a new run in another folder"
        )
    model.requires_grad_(False)
    tune(model, device, seq_len)
    return Teacher(model.to(device).eval(), finetune.distill_weight, finetune.distill_temperature)


# ------------------------------------------------------------------ whether it fits the data


def check_tokenizer(start: "Checkpoint", prepared: "Prepared") -> None:
    """Refuse tokens made by another tokenizer than the model's, which the model would read as other words.

    Compared is everything that maps text to ids: vocabulary and merges, added tokens, normalisation and splitting.
    """
    from attnres.data import load_tokenizer

    ours, theirs = (json.loads(load_tokenizer(folder).to_str()) for folder in (prepared.path, start.folder))
    parts = ("model", "added_tokens", "normalizer", "pre_tokenizer")
    different = [name for name in parts if ours.get(name) != theirs.get(name)]
    if different:
        raise UserError(
            f"the tokens in {prepared.path} were made by another tokenizer than that of {start.name} (they differ in "
            f"{different[0]}): prepare the text with --tokenizer {start.folder}"
        )


def _check_fit(start: "Checkpoint", model: Any, seq_len: int, prepared: "Prepared") -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if prepared.vocab_size > rows:
        raise UserError(
            f"the tokenizer of {start.name} has ids up to {prepared.vocab_size - 1} and its embedding {rows} rows: "
            "they belong to different models, or it has no end-of-text token and one was added"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise UserError(
            f"data.seq_len is {seq_len} and {start.name} was made for at most {longest} tokens: give "
            f"--seq-len {longest} or less"
        )
