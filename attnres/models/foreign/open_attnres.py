"""The format of open-attention-residuals."""

import math
from typing import Any, ClassVar

from attnres.models.foreign.format import (
    Config,
    Target,
    WeightRule,
    WrittenFormat,
    cannot,
    need,
    plain_config,
    same_eps,
    serve,
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

    def says(self, config: Config) -> bool:
        return config.get("model_type") == "qwen3_attnres" or "attnres_mode" in config

    def read(self, config: Config) -> Target:
        need(self, config, "num_hidden_layers", "hidden_size", "rms_norm_eps")
        mode, gate = config.get("attnres_mode", "block"), config.get("attnres_gate_type", "bias")
        serve("this checkpoint", config, {"attnres_mode": ("block", "full")})
        serve("this checkpoint", config, {"attnres_gate_type": tuple(self.gate_types)})
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
