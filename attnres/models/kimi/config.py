"""The config of Kimi K3's text model: that of Transformers' `kimi_linear` and a field for each thing that K3 adds."""

from typing import Any

from transformers import KimiLinearConfig

from attnres.errors import UserError

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
