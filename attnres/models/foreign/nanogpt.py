"""The format of the nanoGPT study."""

from typing import Any

from attnres.errors import UserError
from attnres.models.foreign.format import Config, Format, Target, WeightRule, need, serve


class NanoGPT(Format):
    """github.com/aupadhyay/attnres-exp: nanoGPT with `residual_mode` full_attnres or block_attnres."""

    name = "nanogpt"
    transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    ignored = (".attn.bias",)  # a mask, where there is no flash attention
    optional = (".bias",)  # Transformers' GPT-2 always has them
    table = "transformer.wte.weight"
    KEY_EPS = 1e-8

    def says(self, config: Config) -> bool:
        return "residual_mode" in config

    def read(self, config: Config) -> Target:
        need(self, config, "n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        served = {
            "residual_mode": ("full_attnres", "block_attnres"),
            "use_moe": (False,),
            "use_value_residual": (False,),
        }
        serve("this checkpoint", config, served)
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
