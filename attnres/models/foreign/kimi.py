"""The format of Kimi K3's release."""

import logging
from typing import Any, ClassVar

from attnres.errors import UserError
from attnres.models.classes import CLASSES
from attnres.models.families import FAMILIES
from attnres.models.foreign.format import Config, Format, Target, WeightRule, query_and_gain, serve

_log = logging.getLogger("attnres")


class Kimi(Format):
    """Kimi K3's names (`modeling_kimi_linear.py` of its release) on any family; Transformers lacks K3's own layers.

    A model type of its own that goes on from a family's name (FlagOS's `qwen3_ar`) is read as that family. A block is
    `attn_res_block_size` transformer layers. A config with a `text_config` has its weights under `language_model.`.
    """

    name = "kimi"
    served: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mla_use_output_gate": (False,),
        "mla_use_nope": (True,),
        "routed_expert_hidden_size": (),
        "latent_moe_use_norm": (False,),
        "activation_situ_beta": (),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "attn_res_output_route": (True,),
        "quantization_config": (),
    }
    served_kda: ClassVar[dict[str, tuple[Any, ...]]] = {"use_full_rank_gate": (False,), "gate_lower_bound": ()}

    def says(self, config: Config) -> bool:
        return self.text(config).get("attn_res_block_size") is not None

    @staticmethod
    def text(config: Config) -> Config:
        """Return the decoder's config."""
        text = config.get("text_config")
        return text if isinstance(text, dict) else config

    def read(self, config: Config) -> Target:
        text = self.text(config)
        family = self._family(str(text.get("model_type")))
        serve("this checkpoint", {**text, "quantization_config": config.get("quantization_config")}, self.served)
        if family == "kimi_linear":
            serve("linear_attn_config", text.get("linear_attn_config") or {}, self.served_kda)
        fields = {k: v for k, v in text.items() if not k.startswith("attn_res_") and k != "quantization_config"}
        config_class: Any = CLASSES[family][0]
        named = config_class.attribute_map
        layers = text.get("num_hidden_layers") or text.get(named.get("num_hidden_layers", ""))
        size, eps = text["attn_res_block_size"], text.get("rms_norm_eps", 1e-5)
        if type(size) is not int or size < 1:
            raise UserError(f"attn_res_block_size is {size!r}: expected a whole number of layers, at least 1")
        if not layers:
            raise UserError("config.json has no 'num_hidden_layers': copy it again")
        return Target(family, fields, "block", {"block_size": 2 * min(size, layers), "key_norm_eps": eps})

    @staticmethod
    def _family(model_type: str) -> str:
        """Return the family of that name, else the one with the longest name that it goes on from. Raises UserError."""
        served = [key for key in CLASSES if FAMILIES.get(key) is not None and FAMILIES[key].layers == "layers"]
        if model_type in served:
            return model_type
        begun = [key for key in served if model_type.startswith(f"{key}_")]
        if not begun:
            raise UserError(
                f"a '{model_type}' with Kimi's names is no family here: expected one of {', '.join(served)}"
            )
        family = max(begun, key=len)
        _log.warning("model type '%s' with Kimi's names is read as a %s with depth reads", model_type, family)
        return family

    def rows(self, residual: Any) -> list[WeightRule]:
        d, count = residual.width, residual.num_sublayers
        starts = [f"model.layers.{i // 2}.{'mlp' if i % 2 else 'self_attention'}_res_" for i in range(count)]
        return query_and_gain([*starts, "model.output_attn_res_"], d)
