"""The format of Kimi K3's release, whose modeling file computes Kimi Linear with depth reads too."""

import logging
import re
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from attnres.errors import UserError
from attnres.models.classes import CLASSES
from attnres.models.config import field_names
from attnres.models.families import FAMILIES
from attnres.models.foreign import mxfp4
from attnres.models.foreign.format import (
    Config,
    Stack,
    Stored,
    Target,
    WeightRule,
    WrittenFormat,
    cannot,
    check_supported,
    one_block_size,
    plain_config,
    plain_reads,
    query_and_gain,
    same_eps,
)
from attnres.text import first_of

_log = logging.getLogger("attnres")

_KIMI_FAMILIES = ("kimi_linear", "kimi_k3")
"""Families whose layers have Kimi's names; with any other family those of the depth reads alone are Kimi's."""
_EXPERT = re.compile(r"\.block_sparse_moe\.experts\.\d+\.(w[123])\.weight$")
_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_CONV = re.compile(r"\.self_attn\.[qkv]_conv1d\.")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_WITHOUT_EFFECT = (
    *("linear_attn_config", "kda_layers", "full_attn_layers", "num_heads", "short_conv_kernel_size"),
    *("first_k_dense_replace", "use_grouped_topk", "auto_map", "torch_dtype", "head_dim", "rope_theta", "rope_scaling"),
)
"""Fields of published configs that a class has under other names, or that change nothing here."""
_TRANSFORMERS_ALONE = (
    *("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
    *("head_dim", "qk_head_dim", "rope_parameters"),
)
"""Fields that Transformers' config has, and the release's says otherwise or not at all."""
_AHEAD = "num_nextn_predict_layers"
_PADDED = 128
"""K3's release pads vectors with one number a head to a multiple of this."""


class Kimi(WrittenFormat):
    """Kimi K3's names (`modeling_kimi_linear.py` of its release) on any family.

    A `kimi_linear` with one of K3's own layers is a `kimi_k3` here. A model type of its own that goes on from a
    family's name (FlagOS's `qwen3_ar`) is read as that family. A block is `attn_res_block_size` transformer layers. A
    config with a `text_config` has its weights under `language_model.`.
    """

    name = "kimi"
    beside = ("vision_tower.", "mm_projector.")
    renamed = (
        (".block_sparse_moe.gate.", ".mlp.gate."),
        (".block_sparse_moe.shared_experts.", ".mlp.shared_experts."),
        (".block_sparse_moe.routed_expert_", ".mlp.routed_expert_"),
        *((f".self_attn.{part}", f".self_attn.forget_gate.{part}") for part in ("f_a_proj", "f_b_proj", "dt_bias")),
        (".self_attn.A_log", ".self_attn.forget_gate.A_log"),
    )
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "attn_res_output_route": (True,),
    }
    plain: ClassVar[Config] = {
        "mla_use_output_gate": False,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
        "activation_situ_beta": None,
        "activation_situ_linear_beta": None,
    }
    """Fields of K3's layers with the values that other families have; where one is missing, the release has these."""
    plain_kda: ClassVar[Config] = {"use_full_rank_gate": False, "gate_lower_bound": None}

    def matches(self, config: Config) -> bool:
        return self.text(config).get("attn_res_block_size") is not None

    @staticmethod
    def text(config: Config) -> Config:
        """Return the decoder's config."""
        text = config.get("text_config")
        return text if isinstance(text, dict) else config

    def _is_quantised(self, config: Config) -> bool:
        """Return whether there are weights in MXFP4. Raises UserError for those of another method."""
        return mxfp4.is_format_of(config.get("quantization_config") or self.text(config).get("quantization_config"))

    # ------------------------------------------------------------------ the config

    def read(self, config: Config) -> Target:
        text = self.text(config)
        self._is_quantised(config)
        check_supported("this checkpoint", text, self.supported)
        if (groups := text.get("num_expert_group")) not in (None, 1):
            check_supported(f"this checkpoint has num_expert_group={groups} and", text, {"use_grouped_topk": (True,)})
        nested = text.get("linear_attn_config") or {}
        family = self._family(str(text.get("model_type")))
        if family == "kimi_linear" and (
            text.get("hidden_act") == "situ"
            or any(text.get(name, off) != off for name, off in self.plain.items())
            or any(nested.get(name, off) != off for name, off in self.plain_kda.items())
        ):
            family = "kimi_k3"
        fields = {name: value for name, value in self.kept(text).items() if not name.startswith("attn_res_")}
        fields.pop(_AHEAD, None)
        if family == "kimi_k3":
            nested = {**self.plain_kda, **nested}
            fields = {"hidden_act": "silu", **self.plain, **fields, "linear_attn_config": nested}
            if fields["activation_situ_beta"] is None:
                if fields["hidden_act"] == "situ":
                    raise UserError("config.json has hidden_act 'situ' and no 'activation_situ_beta': copy it again")
                del fields["activation_situ_beta"]
        else:
            check_supported(
                "this checkpoint", text, {name: () if off is None else (off,) for name, off in self.plain.items()}
            )
        config_class: Any = CLASSES[family][0]
        named = config_class.attribute_map
        layers = text.get("num_hidden_layers") or text.get(named.get("num_hidden_layers", ""))
        size, eps = text["attn_res_block_size"], text.get("rms_norm_eps", 1e-5)
        if type(size) is not int or size < 1:
            raise UserError(f"attn_res_block_size is {size!r}: expected a whole number of layers, at least 1")
        if not layers:
            raise UserError("config.json has no 'num_hidden_layers': copy it again")
        if family in _KIMI_FAMILIES:
            if sorted([*nested.get("kda_layers", ()), *nested.get("full_attn_layers", ())]) != [*range(1, layers + 1)]:
                raise UserError(
                    "linear_attn_config of config.json does not say which layers are KDA: expected kda_layers and "
                    f"full_attn_layers, in which each of 1 to {layers} is once"
                )
            known = {*field_names(config_class), *named, *named.values(), *self.supported, *_WITHOUT_EFFECT}
            if unread := sorted(name for name, value in {**fields, **nested}.items() if value and name not in known):
                _log.warning("config.json has %s, which no class here reads", first_of(unread, "other field"))
        return Target(family, fields, "block", {"block_size": 2 * min(size, layers), "key_norm_eps": eps})

    @staticmethod
    def _family(model_type: str) -> str:
        """Return the family of that name, else the one with the longest name that it goes on from. Raises UserError."""
        supported = [key for key in CLASSES if FAMILIES.get(key) is not None and FAMILIES[key].layers == "layers"]
        if model_type in supported:
            return model_type
        begun = [key for key in supported if model_type.startswith(f"{key}_")]
        if not begun:
            raise UserError(
                f"a '{model_type}' with Kimi's names is no family here: expected one of {', '.join(supported)}"
            )
        family = max(begun, key=len)
        _log.warning("model type '%s' with Kimi's names is read as a %s with depth reads", model_type, family)
        return family

    def kept(self, config: Config) -> Config:
        if isinstance(text := config.get("text_config"), dict):
            config = {**config, "text_config": self.kept(text)}
        dropped = ("quantization_config", "vision_config", "media_placeholder_token_id", "_attn_implementation")
        config = {name: value for name, value in config.items() if name not in dropped}
        return {**config, _AHEAD: 0} if _AHEAD in config else config

    def write(self, config: Any, residual: Any, stored: Config) -> Config:
        plain_reads(self, residual)
        same_eps(self, residual, config.rms_norm_eps)
        if not _has_kimi_layers(config):
            raise cannot(self, f"its family is {_family(config)}, expected {' or '.join(_KIMI_FAMILIES)}")
        if not getattr(config, "mla_use_nope", True):
            raise cannot(self, "its latent attention has positions (mla_use_nope is off)")
        layers, size = config.num_hidden_layers, one_block_size(self, residual)
        if size % 2:
            raise cannot(self, f"its blocks have {size} sublayers, expected an even number: whole layers")
        dense = config.mlp_layer_types.count("dense")
        if "dense" in config.mlp_layer_types[dense:]:
            raise cannot(self, "a layer with a dense MLP follows one with experts")
        old = self.text(stored)
        blocks = old.get("attn_res_block_size", size // 2)
        fields = plain_config(config)
        for name in _TRANSFORMERS_ALONE:
            fields.pop(name, None)
        full = [i for i, kind in enumerate(config.layer_types, 1) if kind == "full_attention"]  # one-based there
        nested = {
            **(old.get("linear_attn_config") or {}),
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "num_heads": config.linear_num_heads,
            "head_dim": config.linear_head_dim,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        }
        nested |= {name: fields.pop(name) for name in self.plain_kda if name in fields}
        text = {
            **old,
            **fields,
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
            "linear_attn_config": nested,
            "max_position_embeddings": config.max_position_embeddings,
            "first_k_dense_replace": dense,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "mla_use_nope": True,
            "attn_res_block_size": blocks if min(blocks, layers) == size // 2 else size // 2,
        }
        if not _is_nested(config):
            return text
        names = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"]}
        return {**names, **stored, "text_config": text}

    # ------------------------------------------------------------------ the weights

    def rows(self, residual: Any) -> list[WeightRule]:
        d, count = residual.width, residual.num_sublayers
        starts = [f"model.layers.{i // 2}.{'mlp' if i % 2 else 'self_attention'}_res_" for i in range(count)]
        return query_and_gain([*starts, "model.output_attn_res_"], d)

    def decoder(self, tensors: dict[str, Stored], config: Any, fields: Config, source: str) -> dict[str, Stored]:
        layers = config.num_hidden_layers
        ahead = range(layers, layers + (self.text(fields).get(_AHEAD) or 0))  # modules for the tokens after the next
        after = {name for name in tensors if (layer := _LAYER.match(name)) and int(layer[1]) in ahead}
        if after:
            _log.warning(
                "%s predicts several tokens (%s=%d), of which the next alone is loaded: %s are left out",
                source,
                _AHEAD,
                len(ahead),
                first_of(sorted(after), "other tensor"),
            )
            tensors = {name: tensor for name, tensor in tensors.items() if name not in after}
        if self._is_quantised(fields):
            tensors = mxfp4.dequantised(tensors, source)
        if _has_kimi_layers(config):
            for name in [name for name in tensors if name.endswith(".A_log")]:
                tensors[name] = _unpadded(tensors[name], config.linear_num_heads, f"'{name}' of {source}")
        return tensors

    def written(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        if _family(config) == "kimi_k3":
            for name in [name for name in tensors if name.endswith(".A_log")]:
                values = tensors[name].flatten()
                tensors[name] = F.pad(values, (0, -len(values) % _PADDED))
        start = "language_model." if _is_nested(config) else ""
        return {start + name: tensor for name, tensor in tensors.items()}

    def ours(self, name: str, config: Any) -> str:
        if not _has_kimi_layers(config):
            return name
        if expert := _EXPERT.search(name):
            return f"{name[: expert.start()]}.mlp.experts.{'down' if expert[1] == 'w2' else 'gate_up'}_proj"
        layer, full = _LAYER.match(name), "full_attention"
        if ".self_attn.g_proj." in name and layer and config.layer_types[int(layer[1]) :][:1] != [full]:
            return name.replace(".g_proj.", ".g_b_proj.")
        return super().ours(_CONV.sub(".self_attn.conv1d.", name), config)

    def theirs(self, name: str, config: Any) -> str:
        if not _has_kimi_layers(config):
            return name
        if stack := self.stack(name, config):
            return stack.names[0]
        if getattr(config, "use_full_rank_gate", False):
            name = name.replace(".self_attn.g_b_proj.", ".self_attn.g_proj.")
        return super().theirs(name, config)

    def stack(self, name: str, config: Any) -> Stack | None:
        if not _has_kimi_layers(config):
            return None
        if experts := _EXPERTS.search(name):
            start, count = f"{name[: experts.start()]}.block_sparse_moe.experts", config.num_local_experts
            parts = ("w1", "w3") if experts[1] == "gate_up_proj" else ("w2",)
            return Stack([f"{start}.{i}.{part}.weight" for i in range(count) for part in parts], count)
        if ".self_attn.conv1d." in name:
            return Stack([name.replace(".conv1d.", f".{part}_conv1d.") for part in "qkv"], 0)
        return None


def _family(config: Any) -> str:
    return config.model_type.removeprefix("attnres_")


def _has_kimi_layers(config: Any) -> bool:
    """Return whether the names of the layers are Kimi's too, and not those of the depth reads alone."""
    return _family(config) in _KIMI_FAMILIES


def _is_nested(config: Any) -> bool:
    """Return whether the decoder's config is `text_config` there: as it was loaded, else K3's."""
    stored = getattr(config, "foreign_config", None)
    return "text_config" in stored if stored else _family(config) == "kimi_k3"


def _unpadded(stored: Stored, heads: int, what: str) -> Stored:
    """Return one number a head, without the zeros after them, in the shape of the parameter here."""
    values = stored[...].flatten()
    if len(values) < heads or values[heads:].any():
        raise UserError(f"{what} has {len(values)} numbers: expected one for each of {heads} heads, and zeros after it")
    kept = values[:heads].view(1, 1, heads, 1)
    return Stored(lambda: kept, tuple(kept.shape), stored.dtype)
