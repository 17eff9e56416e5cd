"""Build a randomly initialised model from a named size, with a residual or as the unmodified Transformers model."""

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attnres.errors import UserError, foreign, unknown
from attnres.models.bases import DepthMixin
from attnres.models.classes import CLASSES
from attnres.models.config import stray_settings
from attnres.models.families import FAMILIES
from attnres.residuals import residual_class
from attnres.text import memory


def _qwen3(width: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "family": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 3 * width,
        "tie_word_embeddings": True,
    }


def _llama(width: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "family": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": False,
    }


def _kimi(
    width: int, heads: int, head: int, experts: int, chosen: int, expert: int, latent: int, layers: int = 27
) -> dict[str, Any]:
    """Return the fields of a Kimi Linear. Every fourth layer and the last have MLA, the others KDA; the first has a
    dense MLP.

    Args:
        head: width of a head, of KDA and MLA. experts, chosen: number of experts in a layer, and for a token besides
            the shared one.
        expert: inner width of an expert. latent: width of MLA's cached latent.
    """
    return {
        "family": "kimi_linear",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "layer_types": [
            "full_attention" if i % 4 == 3 or i == layers - 1 else "linear_attention" for i in range(layers)
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * width,
        "moe_intermediate_size": expert,
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "n_shared_experts": 1,
        "linear_head_dim": head,
        "linear_num_heads": heads,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
    }


SIZES: dict[str, dict[str, Any]] = {
    # The models of the studies' presets of these names (lab/presets.py): twelve layers, enough to show effects of
    # depth, and narrow, for a CPU.
    "pico": _qwen3(32, 12, 1, 1, 32),
    "micro": _qwen3(64, 12, 2, 1, 32),
    "nano": _qwen3(128, 12, 4, 2, 32),
    "100m": _qwen3(512, 12, 8, 4, 64),
    "0.6b": _qwen3(1024, 28, 16, 8, 128),  # Qwen3-0.6B's shape
    "gpt2-124m": {
        "family": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    # Shapes of Llama 2 (arXiv 2307.09288; its 7B) and Llama 3 (arXiv 2407.21783, table 3), for `attnres plan`; their
    # vocabularies, 32,000 and 128,256 words, are `--vocab-size`.
    "7b": _llama(4096, 32, 32, 32, 11008),
    "8b": _llama(4096, 32, 32, 8, 14336),
    "70b": _llama(8192, 80, 64, 8, 28672),
    # The model of the paper's main result (Kimi Linear 48B-A3B, arXiv 2510.26692, with a vocabulary of 163,840 words),
    # which has blocks of 6 sublayers; and the same shape for a CPU.
    "kimi-48b": _kimi(2304, 32, 128, experts=256, chosen=8, expert=1024, latent=512),
    "kimi-nano": _kimi(128, 4, 32, experts=16, chosen=4, expert=32, latent=64),
    # Kimi K3 (arXiv 2607.24653, with a vocabulary of 163,840 words), which has blocks of 24 sublayers; and a small
    # one for a CPU.
    "k3-2.8t": {
        **_kimi(7168, 96, 128, experts=896, chosen=16, expert=3072, latent=512, layers=93),
        "family": "kimi_k3",
        "intermediate_size": 33792,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
        "routed_expert_hidden_size": 3584,
    },
    "k3-nano": {
        **_kimi(128, 4, 32, experts=16, chosen=4, expert=64, latent=64, layers=13),
        "family": "kimi_k3",
        "n_shared_experts": 2,
        "q_lora_rank": 64,
        "routed_expert_hidden_size": 64,
    },
}


MOST_LAYERS = 10_000
"""Largest accepted number of layers: a typing error would otherwise keep the program busy for days."""


def build(
    size: str | Mapping[str, Any] = "nano",
    residual: str = "block",
    *,
    vocab_size: int,
    max_positions: int = 2048,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> DepthMixin:
    """Return a randomly initialised causal language model.

    >>> model = build("pico", "block", vocab_size=50)
    >>> model(input_ids=torch.arange(9)[None]).logits.shape
    torch.Size([1, 9, 50])

    Two models of one size, vocabulary and seed have identical shared weights, whatever their residuals: the weights are
    drawn before the residual's parameters are made.

    Args:
        size: a name in `SIZES`, or {"family": name, **fields of the Hugging Face config}.
        residual: a mechanism's name, or FILE.py:CLASS; `settings` are its settings.
        vocab_size, max_positions: of the token embedding; longest sequence.
        seed: seed of the weights. The global random state does not change.

    Raises:
        UserError: unknown names, impossible settings.
    """
    key, fields = _resolved(size, vocab_size, max_positions)
    config_class, model_class = CLASSES[key]
    fields |= {"residual": residual_class(residual).name, "residual_settings": dict(settings or {})}
    return _drawn(key, model_class, config_class, fields, seed)


def build_shapes(
    name: str | Path,
    residual: str | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | torch.device = "meta",
) -> DepthMixin:
    """Return the model of a folder, a run or a hub name, made from its config.json only: shapes without memory, or
    random weights.

    Args:
        residual: the residual for a plain model, by default "block", with `settings`; a model with depth reads keeps
            its own.
        device: the meta device gives shapes; another device gets random weights.

    Raises:
        UserError: no such model, a family that is not listed, or a residual for a model that has one.
    """
    from transformers import AutoModelForCausalLM

    from attnres.models.open import open_config

    described = open_config(name)
    config = described.config
    with foreign(f"the model of {name} cannot be built", "is its config.json complete?"), torch.device(device):
        if described.residual is not None:
            if residual not in (None, described.residual) or settings:
                raise UserError(f"{name} has the residual '{described.residual}': leave residual and settings out")
            return AutoModelForCausalLM.from_config(config)
        pairs = (pair for pair in CLASSES.values() if type(config) in pair[0].__bases__)
        config_class, cls = next(pairs, (None, None))
        if config_class is None or cls is None:
            raise UserError(f"{name} is of type '{config.model_type}', which is not among attnres families")
        left = ("model_type", "auto_map", *stray_settings(type(config), vars(config)))
        fields = {key: value for key, value in config.to_dict().items() if key not in left}
        depth = {"residual": residual_class(residual or "block").name, "residual_settings": dict(settings or {})}
        return cls(config_class(**fields, **depth))


def build_plain(
    size: str | Mapping[str, Any] = "nano", *, vocab_size: int, max_positions: int = 2048, seed: int = 0
) -> PreTrainedModel:
    """Return the unmodified Transformers model, with the weights that `build` draws for the standard residual.

    >>> type(build_plain("pico", vocab_size=50)).__name__
    'Qwen3ForCausalLM'

    Raises:
        UserError: as for `build`.
    """
    key, fields = _resolved(size, vocab_size, max_positions)
    config_class, model_class = CLASSES[key]
    return _drawn(key, model_class.plain_class, config_class.__bases__[1], fields, seed)


def check_size(size: str | Mapping[str, Any]) -> None:
    """Refuse with a UserError a size with an unknown family, or with unknown or missing fields. Quick."""
    _resolved(size, 256, 256)


def _resolved(size: str | Mapping[str, Any], vocab_size: int, max_positions: int) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of its config. Raises UserError."""
    if isinstance(size, str):
        if size not in SIZES:
            raise unknown("model size", size, SIZES)
        size = SIZES[size]
    fields = copy.deepcopy(dict(size))  # a copy, because Transformers fills in nested fields in place
    key = fields.pop("family", None)
    if key is None:
        keys = ", ".join(map(str, fields))
        raise UserError(f"the size {{{keys}}} names no family: expected {{family: qwen3, hidden_size: 64, ...}}")
    if not isinstance(key, str) or key not in FAMILIES:
        raise unknown("model family", str(key), FAMILIES)
    if key not in CLASSES:
        raise UserError(f"{FAMILIES[key].causal_lm} is not in the installed Transformers: upgrade it")
    config_class: Any = CLASSES[key][0]
    # No special tokens: Transformers' defaults for a family are ids of the family's tokenizer.
    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **fields}
    fields |= {"vocab_size": vocab_size, FAMILIES[key].positions: max_positions}
    _check_fields(config_class, fields)
    names = [config_class.attribute_map.get(name, name) for name in ("hidden_size", "num_hidden_layers")]
    config_names = {config_class.attribute_map.get(name, name) for name in fields}  # a family may have other names
    if missing := [name for name in names if name not in config_names]:
        raise UserError(
            f"the size {{family: {key}}} does not say {' and '.join(missing)}, and {key}'s defaults may be billions "
            "of parameters: give them"
        )
    return key, fields


def _drawn(key: str, model_class: Any, config_class: Any, fields: Mapping[str, Any], seed: int) -> Any:
    """Return a model with weights drawn from the seed. Raises UserError."""
    with foreign(f"a {key} model of this size cannot be built", "change the fields of the size"):
        config = config_class(**fields)
        _refuse_larger_than_memory(model_class, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return model_class(config)


def _refuse_larger_than_memory(model_class: Any, config: Any) -> None:
    """Raise UserError if the weights alone exceed this machine's memory, unless the device is meta."""
    if config.num_hidden_layers * config.hidden_size**2 < 10**8 or torch.get_default_device().type == "meta":
        return
    with torch.device("meta"):
        needed = 4 * sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise UserError(
            f"the weights of this size take {memory(needed)}, and this machine has {memory(available)}: take a "
            "smaller one"
        )


def _check_fields(config_class: Any, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the family does not have (its config would store them without effect), and heads that do not
    divide the width."""
    field_names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    for name in fields:
        if name not in field_names:
            raise unknown("field of the model size", name, field_names)

    def value(name: str) -> Any:
        return fields.get(name, fields.get(config_class.attribute_map.get(name, name)))

    for name in ("vocab_size", "max_position_embeddings"):
        if isinstance(size := value(name), int) and size < 1:
            raise UserError(f"{name} is {size}: expected 1 or more")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if (count := value(name)) is not None and (type(count) is not int or count < 1):
            raise UserError(f"{name} is {count!r}: expected a whole number, at least 1")
    layers = value("num_hidden_layers")
    if layers is not None and layers > MOST_LAYERS:
        raise UserError(f"num_hidden_layers is {layers}: expected 1 to {MOST_LAYERS:,}")
    width, heads, shared = value("hidden_size"), value("num_attention_heads"), value("num_key_value_heads")
    apart = fields.get("head_dim") or fields.get("v_head_dim")  # heads whose width is no share of the model's
    if width and heads and not apart and width % heads:
        raise UserError(f"hidden_size is {width} and num_attention_heads {heads}: the width must be divisible by them")
    if heads and shared and heads % shared:
        raise UserError(
            f"num_attention_heads is {heads} and num_key_value_heads {shared}: the first must be a multiple"
        )
