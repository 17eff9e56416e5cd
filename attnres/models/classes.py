"""Config and model classes with depth reads, one pair per family, registered with Transformers' Auto classes.

Each is a subclass of the family's own class. The residual and its settings are fields of the config, its parameters one
module, `model.residual`; every other weight keeps its name, so plain checkpoints load directly.
"""

import functools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import UserError
from ..residuals import RESIDUALS, Residual, make_residual, settings_of
from .families import FAMILIES, Family
from .stream import Stream, make_reading

_SETTING_NAMES = frozenset(key for name in RESIDUALS for key in settings_of(name))


class ResidualConfigMixin:
    """Config fields `residual` (a name of `attnres.residuals.RESIDUALS`) and `residual_settings` (its settings)."""

    residual: str
    residual_settings: dict[str, Any] | None
    num_hidden_layers: int
    hidden_size: int

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # ty: ignore[missing-attribute]
        stray = sorted(_SETTING_NAMES & set(kwargs) | _SETTING_NAMES & set(vars(self)))
        if stray:
            raise UserError(f"config field '{stray[0]}' is a setting of a residual: put it into residual_settings")
        with torch.device("meta"):
            self.make_residual()

    def make_residual(self) -> Residual:
        settings = self.residual_settings or {}
        return make_residual(self.residual, 2 * self.num_hidden_layers, self.hidden_size, **settings)


def _start_stream(residual: Residual, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args:
        raise TypeError(
            f"{type(layer).__name__} was called without a positional hidden state: its family cannot stream"
        )
    return (Stream.start(residual, args[0]), *args[1:])


def _show_hidden_states(base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """With `output_hidden_states`, streams become vectors: the running sum, as for a plain model."""
    states = getattr(output, "hidden_states", None)
    if states is not None:
        output.hidden_states = tuple(s.hidden_state() if isinstance(s, Stream) else s for s in states)


class DepthMixin(PreTrainedModel):
    """A causal language model whose hidden state is a depth stream; mixed in front of the family's own class."""

    family: Family
    _keep_in_fp32_modules_strict = ["residual"]  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        base = getattr(self, self.base_model_prefix)
        layers = getattr(base, self.family.layers)
        with torch.device(layers[0].parameters().__next__().device):
            self.residual = config.make_residual()
        self.residual.float()
        for layer in layers:
            for name in self.family.pre_norms:
                make_reading(getattr(layer, name))
        make_reading(getattr(base, self.family.final_norm))
        layers[0].register_forward_pre_hook(functools.partial(_start_stream, self.residual))
        base.register_forward_hook(_show_hidden_states)
        self._scale_branches(layers)

    def _scale_branches(self, layers: nn.ModuleList) -> None:
        scale = self.residual.branch_scale()
        if scale == 1.0:
            return
        with torch.no_grad():
            for layer in layers:
                for path in self.family.branch_weights:
                    name, _, part = path.partition("[")
                    weight: Tensor = layer.get_parameter(f"{name}.weight")
                    if weight.is_meta:  # a checkpoint's values are about to be loaded
                        return
                    (weight[:, weight.shape[1] * 2 // 3 :] if part else weight).mul_(scale)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Residual):
            module.init_parameters()
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(  # ty: ignore[incompatible-method-override]
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kw: Any
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and options.get("use_reentrant"):
            raise UserError(
                "use_reentrant=True was given: reentrant checkpointing drops gradients of a depth stream's earlier "
                "sources without a word; pass use_reentrant=False"
            )
        if gradient_checkpointing_func is None:
            super()._set_gradient_checkpointing(enable, **kw)
        else:
            super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kw)


def _make_classes(key: str, family: Family) -> tuple[type, type]:
    base_config = getattr(transformers, family.config)
    base_model = getattr(transformers, family.causal_lm)
    config = type(
        f"AttnRes{family.config}",
        (ResidualConfigMixin, base_config),
        {
            "__module__": __name__,
            "__doc__": f"{family.config} with a residual: `residual`, `residual_settings`.",
            "__annotations__": {"residual": str, "residual_settings": dict | None},
            "model_type": f"attnres_{key}",
            "residual": "block",
            "residual_settings": None,
        },
    )
    model = type(
        f"AttnRes{family.causal_lm}",
        (DepthMixin, base_model),
        {
            "__module__": __name__,
            "__doc__": f"{family.causal_lm} whose sublayers read and write a depth stream.",
            "config_class": config,
            "__annotations__": {"config": config},
            "family": family,
        },
    )
    AutoConfig.register(f"attnres_{key}", config)
    AutoModelForCausalLM.register(config, model)
    return config, model


CLASSES: dict[str, tuple[type, type]] = {key: _make_classes(key, family) for key, family in FAMILIES.items()}
# Importable by name, as pickling and `from attnres.models.classes import AttnResQwen3Config` expect.
for _pair in CLASSES.values():
    for _cls in _pair:
        globals()[_cls.__name__] = _cls
