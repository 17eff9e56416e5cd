"""The Hugging Face decoders that can have depth reads, as data: a further family is one line.

A family that is not listed is probed when it is converted (`probe.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from attnres.errors import UserError

CHECKED_WITH = "5.23.0"
"""The version of Transformers with which the table was checked: every family has a test with a small random model."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names of a decoder's parts.

    Attributes:
        config, causal_lm: names of the family's classes in `transformers` (for kimi_k3 in `attnres.models.kimi`): its
            config and its language model, or the class that was probed.
        layers, final_norm: paths in the base model.
        reads: paths in a layer, in the order of the calls, of the modules that take the stream: attention's, then the
            MLP's.
        normed: whether those are norms. A norm removes the scale of a read. If attention and MLP take the stream itself
            (OLMo-2), only reads with `read_scale="sum"` equal the standard residual at zero queries.
        parallel: the config field by which attention and MLP read one stream in parallel, which is refused.
        projections: paths in a layer of the attention's projections of queries, keys and values, or of the one that
            makes all three. If a layer has other projections, residuals with a read for each of them are refused.
        by_head: the fused projection makes query, key and value of each head in turn; else all queries, all keys, all
            values.
        sublayers: kinds of the sublayers of a layer, in order.
        branch_weights: weights of a layer that DeepNorm scales (values, outputs, MLP); "name[2/3:]" is the last third
            of the output features of a fused projection stored as (in, out). Empty: DeepNorm is refused.
        shrunk_weights: weights of a layer that Transformers draws smaller the deeper the network is, by sqrt(2M) of M
            layers.
        positions: the config field for the longest sequence.
    """

    config: str
    causal_lm: str
    layers: str = "layers"
    reads: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "norm"
    normed: bool = True
    parallel: str | None = None
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    sublayers: tuple[str, ...] = ("attention", "mlp")
    branch_weights: tuple[str, ...] = (
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    shrunk_weights: tuple[str, ...] = ()
    positions: str = "max_position_embeddings"

    @property
    def places(self) -> tuple[Any, ...]:
        """Return where models with such a config read the stream; two models with equal places are of one family."""
        return self.config, self.layers, self.reads, self.final_norm, self.normed


def layer_count(config: Any) -> int | None:
    """Return the number of layers of a model's text decoder, or of its only stack; None if no config gives it."""
    if config.is_encoder_decoder and hasattr(config, "num_decoder_layers"):
        return config.num_decoder_layers
    return getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)


def _named(name: str, **other) -> Family:
    """Return a family with Transformers' usual class names."""
    return Family(config=f"{name}Config", causal_lm=f"{name}ForCausalLM", **other)


_GLM = ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_STARCODER = ("self_attn.v_proj", "self_attn.o_proj", "mlp.c_fc", "mlp.c_proj")
_GEMMA2 = ("input_layernorm", "pre_feedforward_layernorm")  # the other two normalise the sublayers' outputs
_OLMO2 = ("self_attn", "mlp")

FAMILIES: dict[str, Family] = {
    "deepseek_v3": _named("DeepseekV3", branch_weights=()),
    "gemma": _named("Gemma"),
    "gemma2": _named("Gemma2", reads=_GEMMA2, branch_weights=()),
    "gemma3_text": Family(config="Gemma3TextConfig", causal_lm="Gemma3ForCausalLM", reads=_GEMMA2, branch_weights=()),
    "glm": _named("Glm", branch_weights=_GLM),
    "glm4": _named("Glm4", branch_weights=()),
    "gpt2": Family(
        config="GPT2Config",
        causal_lm="GPT2LMHeadModel",
        layers="h",
        reads=("ln_1", "ln_2"),
        final_norm="ln_f",
        projections=("attn.c_attn",),
        branch_weights=("attn.c_attn[2/3:]", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        shrunk_weights=("attn.c_proj", "mlp.c_proj"),
        positions="n_positions",
    ),
    "gpt_neox": _named(
        "GPTNeoX",
        final_norm="final_layer_norm",
        parallel="use_parallel_residual",
        projections=("attention.query_key_value",),
        by_head=True,
        branch_weights=(),
    ),
    "gpt_oss": _named("GptOss", branch_weights=()),
    "granite": _named("Granite"),
    "hunyuan_v1_dense": _named("HunYuanDenseV1"),
    "hunyuan_v1_moe": _named("HunYuanMoEV1", branch_weights=()),
    "kimi_k3": _named("KimiK3", branch_weights=()),  # its classes are `attnres.models.kimi`'s
    "kimi_linear": _named("KimiLinear", branch_weights=()),
    "llama": _named("Llama"),
    "ministral": _named("Ministral"),
    "ministral3": _named("Ministral3"),
    "mistral": _named("Mistral"),
    "mixtral": _named("Mixtral", branch_weights=()),
    "olmo": _named("Olmo"),
    "olmo2": _named("Olmo2", reads=_OLMO2, normed=False, branch_weights=()),
    "olmo3": _named("Olmo3", reads=_OLMO2, normed=False, branch_weights=()),
    "phi3": _named("Phi3", projections=("self_attn.qkv_proj",), branch_weights=()),
    "qwen2": _named("Qwen2"),
    "qwen2_moe": _named("Qwen2Moe", branch_weights=()),
    "qwen3": _named("Qwen3"),
    "qwen3_moe": _named("Qwen3Moe", branch_weights=()),
    "qwen3_next": _named("Qwen3Next", branch_weights=()),
    "smollm3": _named("SmolLM3"),
    "stablelm": _named("StableLm", parallel="use_parallel_residual"),
    "starcoder2": _named("Starcoder2", branch_weights=_STARCODER),
}

BOTH, SUM, PROBED, REFUSED = "mean and sum", "sum only", "probed", "refused"

_PARALLEL = "attention and MLP read one stream side by side (parallel residual)"
_INKLING = ("inkling2", "inkling2_text")

_OTHERS = (
    ("Inkling 2", _INKLING, REFUSED, "has depth reads of its own; residual 'inkling2' is their like"),
    ("Cohere, Phi, GPT-J, CodeGen", ("cohere", "cohere2", "phi", "gptj", "codegen"), REFUSED, _PARALLEL),
    ("Falcon", ("falcon",), PROBED, f"refused with parallel_attn: {_PARALLEL}"),
    ("GPT-1", ("openai-gpt",), REFUSED, "a norm follows the addition (post-norm)"),
    ("OPT", ("opt",), REFUSED, "layers reshape the hidden state; in OPT-350m a norm follows the addition"),
    ("Mamba", ("mamba", "mamba2"), REFUSED, "a layer has one sublayer, and casts the hidden state itself"),
    ("any other", (), PROBED, "looked at when it is converted, and refused with the reason where it does not fit"),
)


def refuse_own_reads(name: str, model_type: str | None) -> None:
    """Raise UserError for a Transformers model that has depth reads of its own."""
    if model_type in _INKLING:
        raise UserError(
            f"{name} is an Inkling 2, which has depth reads of its own: Transformers loads it as it is, and residual "
            "'inkling2' gives such reads to other models"
        )


class FamilyRow(NamedTuple):
    """One row of `attnres families`.

    Attributes:
        family: name of the family.
        model_types: `model_type` in config.json.
        kind: which reads are exact at conversion: "mean and sum" (the mean up to the norms' eps), "sum only", "probed"
            or "refused".
        note: the reason or the condition, or "".
        checked: the version of Transformers with which it was checked.
    """

    family: str
    model_types: tuple[str, ...]
    kind: str
    note: str
    checked: str = CHECKED_WITH


def families_table() -> list[FamilyRow]:
    """Return a row for each family: whether it converts, how exactly, or why it is refused.

    >>> [row.kind for row in families_table() if row.family == "GPT2"]
    ['mean and sum']
    """
    rows = []
    for key, family in FAMILIES.items():
        note = "" if family.normed else "attention and MLP take the stream with no norm before them"
        if family.parallel:
            note = f"refused with {family.parallel}: {_PARALLEL}"
        name = family.causal_lm.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        rows.append(FamilyRow(name, (key,), BOTH if family.normed else SUM, note))
    return rows + [FamilyRow(*other) for other in _OTHERS]
