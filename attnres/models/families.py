"""Which Hugging Face decoders have depth reads, as data: a further family is one line."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a pre-norm decoder keeps its parts.

    Attributes:
        config, causal_lm: names of the family's classes in `transformers`.
        layers, final_norm: attributes of the base model.
        pre_norms: attributes of a layer, in the order in which the layer calls them.
        branch_weights: weights of a layer that DeepNorm scales (values, outputs, MLP); "name[2/3:]" is a last part of
            the output features of a fused projection stored as (in, out).
        positions: the config field for the longest sequence.
    """

    config: str
    causal_lm: str
    layers: str = "layers"
    pre_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "norm"
    branch_weights: tuple[str, ...] = (
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    positions: str = "max_position_embeddings"


FAMILIES: dict[str, Family] = {
    "qwen3": Family(config="Qwen3Config", causal_lm="Qwen3ForCausalLM"),
    "llama": Family(config="LlamaConfig", causal_lm="LlamaForCausalLM"),
    "gpt2": Family(
        config="GPT2Config",
        causal_lm="GPT2LMHeadModel",
        layers="h",
        pre_norms=("ln_1", "ln_2"),
        final_norm="ln_f",
        branch_weights=("attn.c_attn[2/3:]", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        positions="n_positions",
    ),
}
