"""Kimi K3's text model (arXiv 2607.24653, `model_type: kimi_k3`) on Transformers' `kimi_linear`: bounded decays and a
full-rank gate in KDA, gated MLA, experts in a latent space, and SiTU-GLU. Depth reads are no part of it: it gets them
as every family does.

With x the normed input of a layer:

    KDA          g = g_min sigmoid(exp(A_h) (W_fb W_fa x + b));    y = W_o [sigmoid(W_g x) * RMSNorm(o)]
    MLA          y = W_o [sigmoid(W_g x) * o]
    SiTU-GLU     W_down [b1 tanh(u / b1) sigmoid(u) * b2 tanh(w / b2)],    u = W_gate x, w = W_up x
    experts      y = W_up RMSNorm(sum_i p_i E_i(W_down x)) + Shared(x),    p from sigmoid(W_r x), as in kimi_linear

Each is on or off by a field of the config; with all of them off this is `kimi_linear`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import KimiLinearConfig
from transformers import initialization as init
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
)
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearDecoderLayer,
    KimiLinearDeltaAttention,
    KimiLinearForCausalLM,
    KimiLinearForgetGate,
    KimiLinearModel,
    KimiLinearMoE,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearTopkRouter,
    eager_attention_forward,
)

from attnres.errors import UserError
from attnres.ops.precision import compute_dtype, full_precision

_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("situ", "silu"), "situ or silu"),
    "num_expert_group": ((1, None), "1, as no router here chooses groups of experts first"),
    "topk_method": (("noaux_tc",), "noaux_tc"),
    "moe_router_activation_func": (("sigmoid",), "sigmoid"),
    "moe_layer_freq": ((1,), "1"),
    "num_nextn_predict_layers": ((0, None), "0, as multi-token prediction (MTP) is not built here"),
    "vision_config": ((None,), "the config of the text model alone, which is text_config"),
}
"""Fields of published configs that choose between layers, the values for which there are layers here, and these in
words."""


class KimiK3Config(KimiLinearConfig):
    """Config of `KimiK3ForCausalLM`. The defaults of the fields below are K3's.

    With `hidden_act="silu"`, `use_full_rank_gate=False`, `gate_lower_bound=None` and `mla_use_output_gate=False` it is
    a `kimi_linear`.

    Attributes:
        hidden_act: of MLPs and experts. "situ" is SiTU-GLU (`activation_situ_beta`, `activation_situ_linear_beta`),
            "silu" is SwiGLU. KDA's convolutions have SiLU in any case.
        activation_situ_beta: bound of the gate's linear factor. activation_situ_linear_beta: bound of the other
            factor; None is no bound.
        use_full_rank_gate: KDA's output gate is one product, not two of low rank.
        gate_lower_bound: the smallest log decay of a step of KDA; None is Kimi Linear's decay, which has no bound.
        mla_use_output_gate: MLA has an output gate.
        mla_use_nope: MLA has no positions; else its `qk_rope_head_dim` channels are rotated as in DeepSeek-V3, by
            `rope_parameters`.
        routed_expert_hidden_size: width of the latent in which the routed experts work; None is `hidden_size`.
        latent_moe_use_norm: a norm follows the experts' sum in the latent.
    """

    model_type = "kimi_k3"

    hidden_act: str = "situ"
    activation_situ_beta: float | int = 4.0
    activation_situ_linear_beta: float | int | None = 25.0
    use_full_rank_gate: bool = True
    gate_lower_bound: float | int | None = -5.0
    mla_use_output_gate: bool = True
    mla_use_nope: bool = True
    rope_parameters: dict | None = None
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = True
    routed_scaling_factor: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        nested = kwargs.get("linear_attn_config") or {}  # as published configs have these two
        self.use_full_rank_gate = nested.get("use_full_rank_gate", self.use_full_rank_gate)
        self.gate_lower_bound = nested.get("gate_lower_bound", self.gate_lower_bound)
        super().__post_init__(**kwargs)
        for name, (values, expected) in _SERVED.items():
            if (value := getattr(self, name, values[0])) not in values:
                raise UserError(f"{name} is {value}: expected {expected}")
        pairs = self.mla_use_nope or self.qk_rope_head_dim % 2 == 0
        for name, fits, expected in (
            ("gate_lower_bound", lambda value: value < 0, "a log decay below 0, or none"),
            ("activation_situ_beta", lambda value: value > 0, "a bound above 0"),
            ("activation_situ_linear_beta", lambda value: value > 0, "a bound above 0, or none"),
            ("routed_expert_hidden_size", lambda value: value > 0, "a width of at least 1, or none"),
            ("qk_rope_head_dim", lambda _: pairs, "an even number, as channels are rotated in pairs"),
        ):
            if (value := getattr(self, name)) is not None and not fits(value):
                raise UserError(f"{name} is {value}: expected {expected}")


def gated_activation(gate: Tensor, up: Tensor, config: KimiK3Config) -> Tensor:
    """Return SiTU(gate) times the bounded `up` in the dtype of `gate`, computed in fp32 at least; silu(gate) up where
    the config says so."""
    if config.hidden_act == "silu":
        return F.silu(gate) * up
    dtype = gate.dtype
    bound, up_bound = config.activation_situ_beta, config.activation_situ_linear_beta
    gate, up = gate.to(compute_dtype(dtype)), up.to(compute_dtype(dtype))
    up = up if up_bound is None else up_bound * torch.tanh(up / up_bound)
    return (bound * torch.tanh(gate / bound) * torch.sigmoid(gate) * up).to(dtype)


class KimiK3MLP(nn.Module):
    def __init__(self, config: KimiK3Config, intermediate_size: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_proj(x), self.up_proj(x), self.config))


class KimiK3ForgetGate(KimiLinearForgetGate):
    """Log decays of KDA (B, T, H, D) between `gate_lower_bound` and 0."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.lower_bound = config.gate_lower_bound

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.lower_bound is None:
            return super().forward(hidden_states)
        z = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        return self.lower_bound * torch.sigmoid(self.A_log.float().exp() * z.unflatten(-1, (-1, self.head_dim)))


class KimiK3DeltaAttention(KimiLinearDeltaAttention):
    """KDA with K3's decay, and its output gate by one product (`g_b_proj`) where `use_full_rank_gate` is on."""

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.activation = "silu"  # of the convolutions
        self.forget_gate = KimiK3ForgetGate(config)
        if config.use_full_rank_gate:  # the forward that is inherited calls both
            self.g_a_proj = nn.Identity()
            self.g_b_proj = nn.Linear(self.hidden_size, self.qkv_dim, bias=False)


class KimiK3Attention(KimiLinearAttention):
    """MLA with an output gate of each channel of each head, and with positions where `mla_use_nope` is off."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.g_proj: nn.Module | None = None
        self.rotary_emb: nn.Module | None = None
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.o_proj.in_features, bias=False)
        if not config.mla_use_nope:
            self.rotary_emb = DeepseekV3RotaryEmbedding(config)
            self.scaling = yarn_apply_mscale(config.rope_parameters, self.scaling)

    def forward(  # ty: ignore[incompatible-method-override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        parts: Any = self  # a query is of one product, or of two of low rank
        if self.q_lora_rank is None:
            query = parts.q_proj(hidden_states)
        else:
            query = parts.q_b_proj(parts.q_a_layernorm(parts.q_a_proj(hidden_states)))
        query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        latent, shared_key = (
            self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        )
        latent = self.kv_a_layernorm(latent)
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb(hidden_states, position_ids)
            still, rotated = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            rotated, shared_key = apply_rotary_pos_emb_interleave(rotated, shared_key, cos, sin)
            query = torch.cat([still, rotated], -1)
        if past_key_values is not None:  # the latents are cached, each as of one head
            latent, shared_key = past_key_values.update(latent, shared_key, self.layer_idx)
        key, value = self.expand_kv(latent, shared_key)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            position_ids=position_ids,
            **kwargs,
        )
        output = output.flatten(2)
        if self.g_proj is not None:
            output = output * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(output), weights


class KimiK3Router(KimiLinearTopkRouter):
    """kimi_linear's router, whose product stays in fp32 under autocast."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with full_precision(hidden_states):
            return super().forward(hidden_states)


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """Routed experts, stacked, of the latent's width."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.config: KimiK3Config = config
        self.num_experts, inner = config.num_local_experts, config.moe_intermediate_size
        width = config.routed_expert_hidden_size or config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, width, inner))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:  # which Transformers' batched and grouped products call too
        return gated_activation(*gate_up.chunk(2, -1), self.config)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (N, width) of each token's experts, one expert after the other."""
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == expert)
            inner = self._apply_gate(F.linear(hidden_states[tokens], self.gate_up_proj[expert]))
            output = F.linear(inner, self.down_proj[expert]) * top_k_weights[tokens, places, None]
            total.index_add_(0, tokens, output.to(total.dtype))
        return total


class KimiK3MoE(KimiLinearMoE):
    """Routed experts in a latent space, chosen by a router of the full width, and a shared one of the full width."""

    def __init__(self, config: KimiK3Config) -> None:
        nn.Module.__init__(self)
        self.experts, self.gate = KimiK3Experts(config), KimiK3Router(config)
        self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.n_shared_experts)
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.routed_expert_down_proj = nn.Linear(width, latent, bias=False) if latent else nn.Identity()
        normed = latent and config.latent_moe_use_norm
        self.routed_expert_norm = KimiLinearRMSNorm(latent, config.rms_norm_eps) if normed else nn.Identity()
        self.routed_expert_up_proj = nn.Linear(latent, width, bias=False) if latent else nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, weights, experts = self.gate(hidden_states)
        routed = self.experts(self.routed_expert_down_proj(hidden_states).flatten(0, -2), experts, weights)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed)).view_as(hidden_states)
        return routed + self.shared_experts(hidden_states)


class KimiK3DecoderLayer(KimiLinearDecoderLayer):
    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)  # kimi_linear's constructor would build its layers
        mixers: Any = config.layer_types  # a list once the config is built
        mlps: Any = config.mlp_layer_types
        self.hidden_size, self.block_type = config.hidden_size, mixers[layer_idx]
        full, sparse = self.block_type == "full_attention", mlps[layer_idx] == "sparse"
        self.self_attn = (KimiK3Attention if full else KimiK3DeltaAttention)(config, layer_idx)
        self.mlp = KimiK3MoE(config) if sparse else KimiK3MLP(config, config.intermediate_size)
        self.input_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)


class KimiK3PreTrainedModel(KimiLinearPreTrainedModel):
    config_class = KimiK3Config
    _no_split_modules = ["KimiK3DecoderLayer"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "e_score_correction_bias"]  # noqa: RUF012

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: these classes are initialised and loaded as those of Transformers are."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, std=self.config.initializer_range)
            init.normal_(module.down_proj, std=self.config.initializer_range)
        elif isinstance(module, KimiK3ForgetGate) and module.lower_bound is not None:
            init.zeros_(module.A_log)


class KimiK3Model(KimiK3PreTrainedModel, KimiLinearModel):
    """The decoder without a head."""

    def __init__(self, config: KimiK3Config) -> None:
        KimiK3PreTrainedModel.__init__(self, config)  # kimi_linear's constructor would build its layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()


class KimiK3ForCausalLM(KimiK3PreTrainedModel, KimiLinearForCausalLM):
    """The language model."""

    def __init__(self, config: KimiK3Config) -> None:
        KimiK3PreTrainedModel.__init__(self, config)
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
