"""The formats of three projects (a fourth: `kimi.py`): their configs, names and layouts as ours, of two also back."""

import math
from typing import Any, ClassVar

from attnres.errors import UserError
from attnres.models.foreign.format import (
    Config,
    Format,
    Target,
    WeightRule,
    WrittenFormat,
    cannot,
    check_supported,
    need,
    one_block_size,
    plain_config,
    plain_reads,
    query_and_gain,
    same_eps,
)


class OpenAttnRes(WrittenFormat):
    """github.com/wdlctc/open-attention-residuals, release: layout `cumulative`, gates, a bias for every read."""

    name = "open-attnres"
    gate_types: ClassVar[dict[str, Config]] = {
        "bias": {},
        "sigmoid_scalar": {"gate": "scalar"},
        "sigmoid_vector": {"gate": "vector"},
        "learnable_alpha": {"alpha": "learnable"},
    }

    def matches(self, config: Config) -> bool:
        return config.get("model_type") == "qwen3_attnres" or "attnres_mode" in config

    def read(self, config: Config) -> Target:
        need(self, config, "num_hidden_layers", "hidden_size", "rms_norm_eps")
        mode, gate = config.get("attnres_mode", "block"), config.get("attnres_gate_type", "bias")
        check_supported("this checkpoint", config, {"attnres_mode": ("block", "full")})
        check_supported("this checkpoint", config, {"attnres_gate_type": tuple(self.gate_types)})
        blocks = config.get("attnres_num_blocks", 8)
        layers = config["num_hidden_layers"]
        size = 1 if mode == "full" else 2 * max(1, math.ceil(layers / blocks))
        bias = float(config.get("attnres_recency_bias_init", 3.0)) if gate == "bias" else 0.0
        settings = {"block_size": size, "key_norm_eps": config["rms_norm_eps"], "recency_bias": bias}
        fields = {k: v for k, v in config.items() if not k.startswith("attnres_")}
        return Target("qwen3", fields, "cumulative", {**settings, **self.gate_types[gate]})

    def rows(self, residual: Any) -> list[WeightRule]:
        d, gates, rows = residual.width, residual.gates, []
        for index in range(residual.num_sublayers):
            start = f"model.layers.{index // 2}.{'mlp' if index % 2 else 'attn'}_res_"
            rows.append(WeightRule("query", index, f"{start}proj.weight", (1, d)))
            rows.append(WeightRule("gain", index, f"{start}norm.weight", (d,)))
            rows.append(WeightRule("gates.bias", index, f"{start}bias", ()))
            if gates.gate_kind == "scalar":
                rows.append(WeightRule("gates.gate", index, f"{start}gate_logit", ()))
            if gates.gate_kind == "vector":
                rows.append(WeightRule("gates.gate_weight", index, f"{start}gate_proj.weight", (d, d)))
                rows.append(WeightRule("gates.gate", index, f"{start}gate_proj.bias", (d,)))
            if gates.alpha is not None:
                rows.append(WeightRule("gates.alpha", index, f"{start}alpha", ()))
        return rows

    def write(self, config: Any, residual: Any, stored: Config) -> Config:
        if config.model_type != "attnres_qwen3" or residual.name != "cumulative":
            raise cannot(self, f"expected a qwen3 with residual 'cumulative', not '{residual.name}'")
        same_eps(self, residual, config.rms_norm_eps)
        gates, weighting = residual.gates, residual.weighting
        if weighting.special is not None or weighting.read_temperature != 1.0:
            raise cannot(self, f"its reads are not theirs ({weighting.special or 'read_temperature'})")
        layers, size = config.num_hidden_layers, residual.block_size
        counts = [stored.get("attnres_num_blocks") or layers, *range(1, layers + 1)]
        blocks = next(
            (n for n in counts if 2 * max(1, math.ceil(layers / n)) == size), counts[0] if size == 1 else None
        )
        if blocks is None:
            raise cannot(self, f"no number of blocks makes blocks of {size} sublayers from {layers} layers")
        alpha = "learnable" if gates.alpha is not None else "none"
        kinds = {(v.get("gate", "none"), v.get("alpha", "none")): k for k, v in self.gate_types.items()}
        return {
            **plain_config(config),
            "model_type": "qwen3_attnres",
            "architectures": ["Qwen3AttnResForCausalLM"],
            "attnres_mode": "full" if size == 1 else "block",
            "attnres_num_blocks": blocks,
            "attnres_gate_type": kinds[gates.gate_kind, alpha],
            "attnres_recency_bias_init": stored.get("attnres_recency_bias_init", gates.recency_bias or 0.0),
        }


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
    """The eps of its norms of q and k; `norm_eps` is that of the others."""

    def matches(self, config: Config) -> bool:
        return config.get("attnres_block_size") is not None

    def read(self, config: Config) -> Target:
        need(self, config, "num_hidden_layers", "hidden_size", "vocab_size", "num_heads")
        check_supported("this checkpoint", config, {"model_type": ("transformer",), "hidden_act": ("swish",)})
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


class NanoGPT(Format):
    """github.com/aupadhyay/attnres-exp: nanoGPT with `residual_mode` full_attnres or block_attnres."""

    name = "nanogpt"
    transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    ignored = (".attn.bias",)  # a mask, where there is no flash attention
    optional = (".bias",)  # Transformers' GPT-2 always has them
    table = "transformer.wte.weight"
    KEY_EPS = 1e-8

    def matches(self, config: Config) -> bool:
        return "residual_mode" in config

    def read(self, config: Config) -> Target:
        need(self, config, "n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        supported = {
            "residual_mode": ("full_attnres", "block_attnres"),
            "use_moe": (False,),
            "use_value_residual": (False,),
        }
        check_supported("this checkpoint", config, supported)
        layers, full = config["n_layer"], config["residual_mode"] == "full_attnres"
        blocks = layers if full else config.get("attnres_n_blocks", 4)
        if type(blocks) is not int or blocks < 1 or layers % blocks:
            raise UserError(f"attnres_n_blocks is {blocks!r}: expected a number that divides the {layers} layers")
        drop = config.get("dropout", 0.0)
        fields = {
            "n_layer": layers,
            "n_head": config["n_head"],
            "n_embd": config["n_embd"],
            "n_positions": config["block_size"],
            "vocab_size": config["vocab_size"],
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), drop),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256 if config["vocab_size"] > 50256 else None),
        }
        settings = {"block_size": 2 * layers // blocks, "key_norm_eps": self.KEY_EPS}
        return Target("gpt2", fields, "boundary", settings)

    def rows(self, residual: Any) -> list[WeightRule]:
        d, blocks = residual.width, range(residual.num_blocks)
        queries = [WeightRule("query", i, f"depth_attn.{i}.w", (d,)) for i in blocks]
        return queries + [WeightRule("gain", i, f"depth_attn.{i}.key_norm.weight", (d,)) for i in blocks]
