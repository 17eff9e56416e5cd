"""The format of flash-linear-attention."""

import math
from typing import Any, ClassVar

from attnres.errors import UserError
from attnres.models.foreign.format import (
    Config,
    Target,
    WeightRule,
    WrittenFormat,
    cannot,
    need,
    one_block_size,
    plain_reads,
    query_and_gain,
    same_eps,
    serve,
)


class FLA(WrittenFormat):
    """flash-linear-attention 0.6, `fla.models.transformer` with `attnres_block_size`."""

    name = "fla"
    renamed = (
        ("model.embeddings.", "model.embed_tokens."),
        (".attn_norm.", ".input_layernorm."),
        (".attn.", ".self_attn."),
        (".mlp_norm.", ".post_attention_layernorm."),
    )
    families: ClassVar[dict[tuple[bool, bool, bool], str]] = {
        # (bias of q, k and v; norm of q and k; sliding window)
        (False, False, False): "llama",
        (True, False, False): "qwen2",
        (False, True, False): "qwen3",
        (False, False, True): "mistral",
    }
    QK_EPS = 1e-5
    """eps of its norms of q and k, whatever `norm_eps` is."""

    def says(self, config: Config) -> bool:
        return config.get("attnres_block_size") is not None

    def read(self, config: Config) -> Target:
        need(self, config, "num_hidden_layers", "hidden_size", "vocab_size", "num_heads")
        serve("this checkpoint", config, {"model_type": ("transformer",), "hidden_act": ("swish",)})
        width, heads, layers = config["hidden_size"], config["num_heads"], config["num_hidden_layers"]
        size, eps, window = config["attnres_block_size"], config.get("norm_eps", 1e-6), config.get("window_size")
        options = (bool(config.get("qkv_bias")), bool(config.get("qk_norm")), window is not None)
        if options not in self.families:
            raise UserError("qkv_bias, qk_norm and window_size together are computed by no class here: one of them is")
        if options[1] and eps != self.QK_EPS:
            raise UserError(f"qk_norm has eps {self.QK_EPS} there and norm_eps is {eps}: a qwen3 has one eps for both")
        if type(size) is not int or size < 1 or (size > 1 and size % 2):
            raise UserError(f"attnres_block_size is {size!r}: expected 1 (Full) or an even number of sublayers")
        inner = config.get("intermediate_size")
        if inner is None:  # two thirds of hidden_ratio * width, rounded up to 256
            inner = 256 * math.ceil(int(width * (config.get("hidden_ratio") or 4) * 2 / 3) / 256)
        fields = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_kv_heads") or heads,
            "head_dim": width // heads,
            "intermediate_size": inner,
            "hidden_act": "silu",
            "rms_norm_eps": eps,
            "vocab_size": config["vocab_size"],
            "max_position_embeddings": config.get("max_position_embeddings", 2048),
            "initializer_range": config.get("initializer_range", 0.02),
            "rope_parameters": {"rope_type": "default", "rope_theta": config.get("rope_theta") or 10000.0},
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "bos_token_id": config.get("bos_token_id", 1),
            "eos_token_id": config.get("eos_token_id", 2),
            "pad_token_id": config.get("pad_token_id"),
        }
        family = self.families[options]
        if family == "mistral":
            fields["sliding_window"] = window
        if family == "qwen2":
            fields.pop("head_dim")
        settings = {"key_norm_eps": eps}
        if size == 1:
            return Target(family, fields, "full", settings)
        return Target(family, fields, "block", {"block_size": min(size, 2 * layers), **settings})

    def rows(self, residual: Any) -> list[WeightRule]:
        d, count = residual.width, residual.num_sublayers
        starts = [f"model.layers.{i // 2}.{'mlp' if i % 2 else 'attn'}_res_" for i in range(count)]
        return query_and_gain([*starts, "model.res_"], d)

    def write(self, config: Any, residual: Any, stored: Config) -> Config:
        plain_reads(self, residual)
        same_eps(self, residual, config.rms_norm_eps)
        family = config.model_type.removeprefix("attnres_")
        if family not in self.families.values():
            raise cannot(self, f"its family is {family}, expected one of {', '.join(self.families.values())}")
        layers, size = config.num_hidden_layers, one_block_size(self, residual)
        heads, rope = config.num_attention_heads, config.rope_parameters
        rotary = rope.get("rope_type", "default") == "default"
        biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
        wide = (getattr(config, "head_dim", None) or config.hidden_size // heads) * heads != config.hidden_size
        sliding = family != "mistral" and getattr(config, "use_sliding_window", False)
        if not rotary or biased or wide or sliding or config.hidden_act != "silu":
            raise cannot(self, "it has a scaled rotary embedding, other biases, other heads or another activation")
        if family == "qwen3" and config.rms_norm_eps != self.QK_EPS:
            raise cannot(self, f"its norms of q and k have eps {config.rms_norm_eps}, theirs {self.QK_EPS}")
        if size > 1 and size % 2:
            if size < 2 * layers:
                raise cannot(self, f"blocks have {size} sublayers, expected 1 or an even number")
            size += 1
        stored_size = stored.get("attnres_block_size", size)
        kinds = {v: k for k, v in self.families.items()}[family]
        return {
            "model_type": "transformer",
            "architectures": ["TransformerForCausalLM"],
            "hidden_size": config.hidden_size,
            "num_hidden_layers": layers,
            "num_heads": heads,
            "num_kv_heads": config.num_key_value_heads,
            "qkv_bias": kinds[0],
            "qk_norm": kinds[1],
            "window_size": config.sliding_window if kinds[2] else None,
            "rope_theta": rope["rope_theta"],
            "max_position_embeddings": config.max_position_embeddings,
            "intermediate_size": config.intermediate_size,
            "hidden_act": "swish",
            "norm_eps": config.rms_norm_eps,
            "initializer_range": config.initializer_range,
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": config.tie_word_embeddings,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "attnres_block_size": stored_size if min(stored_size, 2 * layers) == size else size,
        }
