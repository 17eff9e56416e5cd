"""A model from a named size and a residual; a model from a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import UserError, unknown
from .classes import CLASSES, DepthMixin
from .families import FAMILIES
from .sizes import SIZES


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
        residual: a name in `attnres.residuals.RESIDUALS`; `settings` are its settings.
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
    config_class, model_class = CLASSES[key]
    # No special tokens: Transformers' defaults for a family are ids of its own tokenizer.
    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **fields}
    fields |= {"vocab_size": vocab_size, FAMILIES[key].positions: max_positions}
    config = config_class(residual=residual, residual_settings=dict(settings or {}), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)


def load(folder: str | Path, **kwargs: Any) -> PreTrainedModel:
    """A model saved by `save_pretrained`, in evaluation mode; `kwargs` go to `from_pretrained`.

    Raises:
        UserError: the folder is missing, holds no such model, or its weights are damaged.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: expected a folder with config.json and model.safetensors")
    try:
        config = AutoConfig.from_pretrained(folder)
        if not isinstance(config, tuple(pair[0] for pair in CLASSES.values())):
            raise UserError(
                f"{folder} holds a plain '{config.model_type}' model: expected one with a residual, saved by attnres"
            )
        return AutoModelForCausalLM.from_pretrained(folder, config=config, **kwargs)
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the model in {folder} cannot be loaded ({reason}): save or copy it again") from error
