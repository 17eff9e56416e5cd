"""A model from a named size and a residual; a model from a folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnres.errors import UserError, first_line, unknown
from attnres.files import read_json
from attnres.models.classes import CLASSES, DepthMixin, register_stored
from attnres.models.families import FAMILIES
from attnres.models.sizes import SIZES


def build(
    size: str | Mapping[str, Any] = "nano",
    residual: str = "block",
    *,
    vocab_size: int,
    max_positions: int = 2048,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> DepthMixin:
    """A causal language model with freshly drawn weights.

    Two models of one size, vocabulary and seed have identical shared weights, whatever their residuals: the weights are
    drawn before the residual's parameters are made, and those start at constants.

    Args:
        size: a name in `SIZES`, or {"family": name, **fields of the Hugging Face config}.
        residual: a mechanism's name, or FILE.py:CLASS; `settings` are its settings.
        vocab_size, max_positions: of the token embedding; longest sequence.
        seed: of the weights. The global random state is left as it was.

    Raises:
        UserError: unknown names, impossible settings.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise unknown("model size", size, SIZES)
        size = SIZES[size]
    fields = dict(size)
    key = fields.pop("family", None)
    if key not in FAMILIES:
        raise unknown("model family", str(key), FAMILIES)
    if key not in CLASSES:
        raise UserError(f"{FAMILIES[key].causal_lm} is not in the installed Transformers: upgrade it")
    config_class, model_class = CLASSES[key]
    # No special tokens: Transformers' defaults for a family are ids of its own tokenizer.
    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **fields}
    fields |= {"vocab_size": vocab_size, FAMILIES[key].positions: max_positions}
    _check_fields(config_class, fields)
    try:
        config = config_class(residual=residual, residual_settings=dict(settings or {}), **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return model_class(config)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
        raise UserError(f"a {key} model of this size cannot be built: {first_line(error)}") from error


def _check_fields(config_class: Any, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the family does not have (its config would keep them and change nothing), and heads that do
    not divide."""
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    for name in fields:
        if name not in known:
            raise unknown("field of the model size", name, known)

    def value(name: str) -> Any:
        return fields.get(name, fields.get(config_class.attribute_map.get(name, name)))

    width, heads, shared = value("hidden_size"), value("num_attention_heads"), value("num_key_value_heads")
    if width and heads and not fields.get("head_dim") and width % heads:
        raise UserError(f"hidden_size is {width} and num_attention_heads {heads}: the width must be divisible by them")
    if heads and shared and heads % shared:
        raise UserError(
            f"num_attention_heads is {heads} and num_key_value_heads {shared}: the first must be a multiple"
        )


def load(folder: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedModel:
    """A model saved by `save_pretrained`, in evaluation mode; `kwargs` go to `from_pretrained`.

    Args:
        trust_remote_code: run code that lies in the folder (a model converted from one that brought its own).

    Raises:
        UserError: the folder is missing, holds no such model, its weights are damaged, or it needs code that was not
            trusted.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: expected a folder with config.json and model.safetensors")
    raw = read_json(folder / "config.json")
    if isinstance(raw, dict):
        register_stored(raw, folder, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder)
        if not isinstance(config, tuple(pair[0] for pair in CLASSES.values())):
            raise UserError(
                f"{folder} holds a plain '{config.model_type}' model: expected one with a residual, saved by attnres"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **kwargs
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the model in {folder} cannot be loaded ({first_line(error)}): save or copy it again"
        ) from error
    model, info = loaded
    if info["missing_keys"]:  # Transformers would draw them at random and go on
        name, *others = sorted(info["missing_keys"])
        raise UserError(f"the model in {folder} lacks '{name}' and {len(others)} other tensors: save or copy it again")
    return model
