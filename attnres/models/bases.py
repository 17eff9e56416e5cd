"""Models whose hidden state is a depth stream: base models and heads, each a subclass of a Transformers class."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedModel

from attnres.errors import UserError
from attnres.files import write_text
from attnres.models.config import model_card
from attnres.models.families import Family
from attnres.models.kda import use_tiles
from attnres.models.outputs import note_hidden_states, routing_forward, show_hidden_states
from attnres.residuals import Residual
from attnres.residuals.values import ValueResidual
from attnres.streams.inputs import Fused, split
from attnres.streams.layers import attach_stream
from attnres.streams.readers import let_checkpoint, parts_in

HOME = "attnres.models.classes"
"""The `__module__` of generated classes."""

GENERATED: dict[str, type] = {}
"""Generated configs and models by class name; the latest of two with one name."""


class Depth(PreTrainedModel):
    """Base class of base models and heads with a depth stream; it precedes the Transformers class in the MRO."""

    family: Family
    plain_class: type[PreTrainedModel]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        parallel = self.family.parallel
        if parallel and getattr(config, parallel):
            raise UserError(
                f"{parallel} is on: attention and MLP read one stream side by side, and depth reads need them one "
                f"after the other; only models with {parallel}=False have a place for them"
            )
        super().__init__(config, *args, **kwargs)
        if self.attach_residual():
            self._scale_branches()
        self._freeze()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load the model as Transformers does, which makes every parameter trainable, then freeze the parameters that
        the residual freezes."""
        loaded: Any = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._freeze()
        return loaded

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: no file of a model defines this class, whatever file of a model it was found through."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return what the plain class returns; as custom code, modules without parameters would stay uninitialised."""
        return cls.plain_class.is_custom_code()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return what the plain class returns; Transformers would search the file of this class, which is not the
        family's."""
        return cls.plain_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return what the plain class returns; otherwise a mixture of experts would run them one by one."""
        return cls.plain_class._can_set_experts_implementation()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        config: Any = self.config
        return config.empty_model, (config.stored, self.plain_class, isinstance(self, DepthBase)), self.__dict__

    def save_pretrained(  # ty: ignore[incompatible-method-override]
        self, save_directory: Any, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Write the model as Transformers does, and a model card where the folder has none."""
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        card, conversion = Path(save_directory) / "README.md", getattr(self, "conversion", None)
        if is_main_process and not card.exists():
            source, report = (None, None) if conversion is None else (conversion.source, conversion.to_dict())
            write_text(card, model_card(self, source, report))

    def save_without_card(self, folder: Path, max_shard_size: str) -> None:
        """Write the model as Transformers does, without a card, for a caller that writes the card itself."""
        super().save_pretrained(folder, max_shard_size=max_shard_size)

    @property
    def depth_base(self) -> nn.Module:
        """Return the module that holds the layers, the final norm and the residual."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def depth_layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.depth_base.get_submodule(self.family.layers))

    @property
    def residual(self) -> Residual:
        """Return the base model's residual."""
        base = self.depth_base
        return cast(Residual, super().__getattr__("residual") if base is self else base.residual)

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.depth_base if name == "residual" else self
        if base is self:
            super().__setattr__(name, value)
        else:
            setattr(base, name, value)

    def _load_from_state_dict(  # ty: ignore[incompatible-method-override]
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Accept the residual's parameters also under their names before version 0.1, "residual.query" at the top. If a
        file has both names, the old ones are reported as unexpected, because nothing says which to use."""
        if self.depth_base is not self:
            for name in [name for name in state_dict if name.startswith(f"{prefix}residual.")]:
                place = f"{prefix}{self.base_model_prefix}.{name.removeprefix(prefix)}"
                if place not in state_dict:
                    state_dict[place] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _set_gradient_checkpointing(  # ty: ignore[incompatible-method-override]
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kw: Any
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and options.get("use_reentrant"):
            raise UserError(
                "use_reentrant=True was given: reentrant checkpointing silently drops gradients of a depth stream's "
                "earlier sources; pass use_reentrant=False"
            )
        for parts in parts_in(self) if enable else ():
            let_checkpoint(parts)
        if gradient_checkpointing_func is None:
            super()._set_gradient_checkpointing(enable, **kw)
        else:
            super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kw)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        residual = getattr(self.depth_base, "residual", None)
        if isinstance(module, ValueResidual):
            module.init_parameters()
        elif residual is not None and module in residual.modules():
            tensors = (*residual.parameters(), *residual.buffers())
            if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
                cast(Residual, residual).init_parameters()  # leaves parameters alone that were loaded
        else:
            super()._init_weights(module)

    def attach_residual(self) -> bool:
        """Make the base model one with a depth stream, and return whether it had none; see the function
        `attach_residual`."""
        base = self.depth_base
        if base is not self and isinstance(base, DepthBase):
            return False
        if base is not self and isinstance(base, PreTrainedModel):
            cls = model_class(type(base), type(self.config), DepthBase)
            # Transformers sets up in this constructor what a class can record (`output_hidden_states`, say).
            PreTrainedModel.__init__(object.__new__(cls), self.config)
            base.__class__ = cls
        attach_residual(base, self.family, self.config)
        # FSDP 1 cannot mix dtypes in a unit, so the residual is a unit
        if next(self.residual.parameters(), None) is not None:
            for module in cast(list[Any], [self, base]):
                module._no_split_modules = {*(module._no_split_modules or ()), type(self.residual).__name__}
        return True

    @torch.no_grad()
    def _scale_branches(self) -> None:
        """Scale the start values of the layers' branch weights as the residual asks for."""
        residual, layers, scales = self.residual, self.depth_layers, dict[str, float]()
        if residual.even_start:
            scales = dict.fromkeys(self.family.shrunk_weights, (2 * len(layers)) ** 0.5)
        scale = residual.branch_scale()
        if scale != 1.0:
            if not self.family.branch_weights:
                raise UserError(
                    f"residual '{self.config.residual}' scales the start values of a layer's branches, which is not "
                    f"implemented for {self.family.causal_lm}: choose another residual or a family such as qwen3"
                )
            scales |= {path: scale * scales.get(path, 1.0) for path in self.family.branch_weights}
        for layer in layers:
            for path, factor in scales.items():
                name, _, part = path.partition("[")
                weight: Tensor = layer.get_parameter(f"{name}.weight")
                if weight.is_meta:  # the values of a checkpoint are loaded later
                    return
                (weight[:, weight.shape[1] * 2 // 3 :] if part else weight).mul_(factor)

    def _freeze(self) -> None:
        """Freeze the parameters that the residual's settings keep at their start values, and projections that it does
        not use."""
        with torch.device("meta"):
            settled = cast(Any, self.config).make_residual()
        for name, parameter in settled.named_parameters():
            if not parameter.requires_grad:
                self.residual.get_parameter(name).requires_grad_(False)
        values, projections = settled.value_mix, self.family.projections
        if values is not None and values.replaces and len(projections) > 1:
            for layer in list(self.depth_layers)[1:]:
                layer.get_submodule(projections[-1]).requires_grad_(False)


class DepthBase(Depth):
    """A base model (without a head) whose hidden state is a depth stream."""


class DepthMixin(Depth):
    """A model with a head whose hidden state is a depth stream."""


def attach_residual(base: nn.Module, family: Family, config: Any) -> None:
    """Make the residual's parameters, and let the layers of `base` read and write a depth stream."""
    layers = cast(nn.ModuleList, base.get_submodule(family.layers))
    with torch.device(next(layers[0].parameters()).device):
        residual = config.make_residual()
    _split_inputs(layers, family, residual, config)
    use_tiles(layers)
    parts = attach_stream(
        base,
        residual,
        list(layers),
        family.reads,
        family.final_norm,
        normed=family.normed,
        banked=family.causal_lm.endswith(("ForCausalLM", "LMHeadModel")),
    )
    base.register_forward_pre_hook(functools.partial(note_hidden_states, parts), with_kwargs=True)
    base.register_forward_hook(show_hidden_states)
    holder = base.get_submodule(family.layers.rpartition(".")[0])
    if holder is not base:
        holder.register_forward_hook(show_hidden_states)


def _split_inputs(layers: nn.ModuleList, family: Family, residual: Residual, config: Any) -> None:
    """Let attentions take a separate input for each of their projections, if the residual provides them."""
    several = any(isinstance(way, str) for index in range(residual.num_sublayers) for way in residual.ways(index))
    if several or residual.value_mix is not None:
        setting = f"residual '{residual.name}'" if several else f"value_residual '{residual.value_kind}'"
        fused = Fused(config.layers_config.num_attention_heads, config.shared_heads, family.by_head)
        split(list(layers), family.projections, fused, setting, family.causal_lm)


@functools.cache
def model_class(plain: Any, config: Any, kind: type[Depth]) -> type[Depth]:
    """Return the subclass of a Transformers class that is a `DepthBase` or a `DepthMixin`, for configs of this
    package."""
    fields = {
        "__module__": HOME,
        "__doc__": f"{plain.__name__} whose sublayers read and write a depth stream.",
        "_auto_class": None,
        "config_class": config,
        "__annotations__": {"config": config},
        "family": config.family,
        "plain_class": plain,
        "_pp_plan": None,  # as for the config
        "_keep_in_fp32_modules_strict": [*(plain._keep_in_fp32_modules_strict or ()), "residual"],
    }
    if kind is DepthMixin:
        fields["forward"] = routing_forward(plain.forward)
    cls = type(f"AttnRes{plain.__name__}", (kind, plain), fields)
    GENERATED[cls.__name__] = cls
    return cls


def plain_class(auto: Any, config: type) -> type[PreTrainedModel] | None:
    """Return the model class that an Auto class has for a plain config class; None if it has none."""
    plain = auto._model_mapping.get(config, None)
    plain = plain[0] if isinstance(plain, tuple) else plain
    return plain if _takes(plain, config) else None


def _takes(plain: Any, config: type) -> bool:
    """Return whether `plain` is a model class for configs of class `config`."""
    return (
        isinstance(plain, type) and issubclass(plain, PreTrainedModel) and issubclass(config, plain.config_class or ())
    )


def class_of(plain: type[PreTrainedModel], config: Any) -> type[Depth]:
    """Return this package's class for a Transformers model class and one of this package's config classes: a
    `DepthBase` for a base model (a class of `AutoModel` or `AutoModelForTextEncoding`), else a `DepthMixin`."""
    bases = [plain_class(auto, config.__bases__[1]) for auto in (AutoModel, AutoModelForTextEncoding)]
    return model_class(plain, config, DepthBase if plain in bases else DepthMixin)


def class_named(name: str, config: type) -> type[Depth] | None:
    """Return this package's class with this name for one of its config classes; None if neither Transformers nor this
    process's conversions have the plain class."""
    generated = getattr(GENERATED.get(name), "plain_class", None)
    plain: Any = generated or getattr(transformers, name.removeprefix("AttnRes"), None)
    return class_of(plain, config) if _takes(plain, config) else None


def checkpoint_activations(model: Any, how: str) -> None:
    """Let a model with a residual store fewer activations for its backward pass; gradients do not change.

    Args:
        how: "none"; "layer" stores the input of each layer, the stream; "sublayer" stores the normed input of each
            attention and MLP, and what the stream itself saves; "reads" recomputes only reads and parallel streams.

    Raises:
        UserError: its layers do not support checkpointing, or have no attention and no MLP.
    """
    if how == "layer":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(
                f"layers of {type(model).__name__} do not support checkpointing: choose sublayer or reads"
            ) from error
    elif how == "sublayer":
        for layer in model.depth_layers:
            found = list(mixers(layer, model.family.reads))
            if not found:
                raise UserError(f"no attention and no MLP is found in {type(layer).__name__}: choose layer or reads")
            for mixer in found:
                mixer.forward = functools.partial(_recomputed, mixer, mixer.forward)
    elif how == "reads":
        model.residual.recompute_reads = True


def mixers(part: nn.Module, reads: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules of a layer that take the result of a read and hold matrices: attention, MLP and the like.

    Args:
        reads: paths in `part` of the modules that read the stream; a module that contains one of them takes the stream
            itself.
    """
    for name, child in part.named_children():
        inside = [path.removeprefix(f"{name}.") for path in reads if path.startswith(f"{name}.")]
        if inside or isinstance(child, nn.ModuleList):
            yield from mixers(child, inside)
        elif any(parameter.ndim > 1 for parameter in child.parameters()):
            yield child


def _recomputed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module's own forward; in training, recompute its inside in the backward pass (activation
    checkpointing)."""
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
