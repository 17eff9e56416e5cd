"""Config and model classes with depth reads, one pair per family, registered with Transformers' Auto classes.

Each is a subclass of the family's own class. The residual and its settings are fields of the config; its parameters are
one module of the base model (`model.model.residual`, also `model.residual`). Every other weight keeps its name, so
plain checkpoints load directly.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from attnres.errors import UserError
from attnres.models.families import FAMILIES, Family
from attnres.models.inputs import Fused, split
from attnres.models.stream import Stream, hidden_states_wanted, make_reading, make_taking
from attnres.residuals import RESIDUALS, Observer, Residual, make_residual, residual_class, settings_of, source_file
from attnres.residuals.registry import is_known
from attnres.residuals.values import ValueResidual


class ResidualConfigMixin:
    """Config fields `residual` (a mechanism's name), `residual_settings` (its settings), and, for a mechanism of a
    user's own file, `residual_file`, which is there to be told: a config runs no file."""

    residual: str
    residual_settings: dict[str, Any] | None
    residual_file: str | None
    sublayers: Sequence[str] = ("attention", "mlp")
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # ty: ignore[missing-attribute]
        self._refuse_stray_settings(kwargs)
        self.residual_file = source_file(self.residual) or self.residual_file
        with torch.device("meta"):
            self.make_residual()

    def _refuse_stray_settings(self, kwargs: Mapping[str, Any]) -> None:
        """A residual's setting among the fields of the config would be kept there and change nothing."""
        fields = {name for cls in type(self).__mro__ for name in vars(cls).get("__annotations__", {})}
        settings = {key for name in list(RESIDUALS) for key in settings_of(name)} - fields
        stray = sorted(settings & {*kwargs, *vars(self)})
        if stray:
            raise UserError(f"config field '{stray[0]}' is a setting of a residual: put it into residual_settings")

    def make_residual(self) -> Residual:
        if ".py:" in self.residual:
            raise UserError(
                f"residual is '{self.residual}' in a config, which runs no file: register the class first "
                "(attnres.register) and give its name"
            )
        residual_class(self.residual, self.residual_file)
        layers = self.num_hidden_layers * len(self.sublayers)
        residual = make_residual(self.residual, layers, self.hidden_size, **(self.residual_settings or {}))
        residual.sublayers = self.sublayers
        if residual.value_kind != "none":
            layers, heads = self.num_hidden_layers, self.shared_heads
            residual.value_residual = ValueResidual(residual.value_kind, layers, heads, self.hidden_size)
        return residual

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values, which several of queries may share."""
        return getattr(self, "num_key_value_heads", None) or self.num_attention_heads


def _start_stream(
    base: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wrap the first layer's input; the residual is that which `base` has when it runs."""
    residual = cast(nn.Module, base._modules["residual"])
    if args:
        return (Stream.start(residual, args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": Stream.start(residual, kwargs["hidden_states"])}


def _note_hidden_states(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take note of whether the pass that begins is asked for its hidden states."""
    if torch.compiler.is_compiling():  # which has no context variables, and takes no bank
        return
    wanted = kwargs.get("output_hidden_states")
    wanted = getattr(base.config, "output_hidden_states", None) if wanted is None else wanted
    hidden_states_wanted.set(wanted is not None and wanted is not False)


def _show_hidden_states(base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """With `output_hidden_states`, streams become vectors: the running sum, as for a plain model."""

    if not torch.compiler.is_compiling():
        hidden_states_wanted.set(False)

    def vectors(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(v.hidden_state() if isinstance(v, Stream) else v for v in value)
        return value

    if type(output) is tuple:  # return_dict=False
        return tuple(map(vectors, output))
    if getattr(output, "hidden_states", None) is not None:
        output.hidden_states = vectors(output.hidden_states)
    return output


def _refuse_parallel(family: Family, config: Any) -> None:
    if family.parallel and getattr(config, family.parallel):
        raise UserError(
            f"{family.parallel} is on: attention and MLP read one stream side by side, and depth reads need them one "
            f"after the other; only models with {family.parallel}=False have a place for them"
        )


class _StartValues(PreTrainedModel):
    """Gives a residual its start values where Transformers draws weights."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        residual = getattr(self, self.base_model_prefix, self)._modules.get("residual")
        if isinstance(module, ValueResidual):
            module.init_parameters()
        elif residual is not None and module in residual.modules():  # which spares what was loaded
            cast(Residual, residual).init_parameters()
        else:
            super()._init_weights(module)


class DepthBase(_StartValues):
    """A base model (without a head) whose hidden state is a depth stream; mixed in front of the family's own class."""

    family: Family
    residual: nn.Module
    _keep_in_fp32_modules_strict = ["residual"]  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_parallel(self.family, config)
        super().__init__(config, *args, **kwargs)
        attach_residual(self, self.family, config)


def attach_residual(base: nn.Module, family: Family, config: Any) -> None:
    """Make the residual's parameters, and let the layers of `base` read and write a stream."""
    layers = cast(nn.ModuleList, base.get_submodule(family.layers))
    with torch.device(next(layers[0].parameters()).device):
        residual = base.residual = config.make_residual().float()
    _split_inputs(layers, family, residual, config)
    let_read = make_reading if family.normed else make_taking
    for layer in layers:
        for path in family.reads:
            let_read(layer.get_submodule(path))
    make_reading(base.get_submodule(family.final_norm))
    layers[0].register_forward_pre_hook(functools.partial(_start_stream, base), with_kwargs=True)
    base.register_forward_pre_hook(_note_hidden_states, with_kwargs=True)
    base.register_forward_hook(_show_hidden_states)


def _split_inputs(layers: nn.ModuleList, family: Family, residual: Residual, config: Any) -> None:
    """Let attentions take inputs for each of their projections, where the residual gives them such."""
    name = residual.name
    several = any(isinstance(way, str) for index in range(residual.num_sublayers) for way in residual.ways(index))
    values = residual.value_residual
    if several or values is not None:
        what = f"residual '{name}'" if several else f"value_residual '{cast(ValueResidual, values).kind}'"
        fused = Fused(config.num_attention_heads, config.shared_heads, family.by_head)
        split(list(layers), family.projections, fused, what, family.causal_lm)
    if values is not None and values.replaces and len(family.projections) > 1:
        for layer in list(layers)[1:]:
            layer.get_submodule(family.projections[-1]).requires_grad_(False)


class DepthMixin(_StartValues):
    """A causal language model whose hidden state is a depth stream; mixed in front of the family's own class."""

    family: Family
    plain_class: type[PreTrainedModel]
    _keep_in_fp32_modules_strict = ["residual"]  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_parallel(self.family, config)
        super().__init__(config, *args, **kwargs)
        self.attach_residual()
        self._scale_branches()

    @property
    def depth_base(self) -> nn.Module:
        """The module that holds the layers, the final norm and the residual."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def depth_layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.depth_base.get_submodule(self.family.layers))

    @property
    def residual(self) -> Residual:
        """The base model's residual."""
        return cast(Residual, self.depth_base._modules["residual"])

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.depth_base if name == "residual" else self
        if base is self:
            super().__setattr__(name, value)
        else:
            setattr(base, name, value)

    def attach_residual(self) -> None:
        """Make the base model one of depth streams; see `attach_residual`."""
        base = self.depth_base
        if base is not self and isinstance(base, PreTrainedModel):
            cls = _base_class(type(base), self.family, type(self.config))
            # Transformers notes in this constructor what a class records (`output_hidden_states`, say).
            PreTrainedModel.__init__(object.__new__(cls), self.config)
            base.__class__ = cls
        attach_residual(base, self.family, self.config)

    def _scale_branches(self) -> None:
        scale = self.residual.itself().branch_scale()
        if scale == 1.0:
            return
        if not self.family.branch_weights:
            raise UserError(
                f"residual '{self.config.residual}' scales the start values of a layer's branches, which is not worked "
                f"out for {self.family.causal_lm}: choose another residual or a family such as qwen3"
            )
        with torch.no_grad():
            for layer in self.depth_layers:
                for path in self.family.branch_weights:
                    name, _, part = path.partition("[")
                    weight: Tensor = layer.get_parameter(f"{name}.weight")
                    if weight.is_meta:  # a checkpoint's values are about to be loaded
                        return
                    (weight[:, weight.shape[1] * 2 // 3 :] if part else weight).mul_(scale)

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


class _Weights:
    """Keeps a forward pass's routing weights, and hands on to the observer that was there."""

    def __init__(self, before: Observer | None) -> None:
        self.before, self.reads = before, list[Tensor]()
        self.shape = torch.Size()

    def on_start(self, embedding: Tensor) -> None:
        self.shape = embedding.shape[:-1]
        if self.before is not None:
            self.before.on_start(embedding)

    def on_read(self, index: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        if weights is None:
            raise UserError("output_routing_weights was asked of a residual that weighs no sources: leave it out")
        self.reads.append(weights.detach().view(*self.shape, -1))
        if self.before is not None:
            self.before.on_read(index, h, weights, values)

    def on_write(self, index: int, output: Tensor) -> None:
        if self.before is not None:
            self.before.on_write(index, output)


def _routing_forward(base_forward: Callable) -> Callable:
    """A family's forward with one more argument, `output_routing_weights`."""

    @functools.wraps(base_forward)
    def forward(self: Any, *args: Any, output_routing_weights: bool = False, **kwargs: Any) -> Any:
        if not output_routing_weights:
            return base_forward(self, *args, **kwargs)
        residual = self.residual("itself")
        weights = _Weights(residual.observer)
        residual.observer = weights
        try:
            output = base_forward(self, *args, **{**kwargs, "return_dict": True})
        finally:
            residual.observer = weights.before
        output["routing_weights"] = tuple(weights.reads)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    signature = inspect.signature(base_forward)
    extra = inspect.Parameter("output_routing_weights", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    *first, last = signature.parameters.values()
    places = [*first, extra, last] if last.kind is last.VAR_KEYWORD else [*first, last, extra]
    forward.__signature__ = signature.replace(parameters=places)  # ty: ignore[missing-attribute]
    return forward


@functools.cache
def _base_class(plain: Any, family: Family, config: type) -> type[PreTrainedModel]:
    """Return the depth base class of a family's plain base model, importable from here by name as pickling expects."""
    cls = type(
        f"AttnRes{plain.__name__}",
        (DepthBase, plain),
        {
            "__module__": __name__,
            "__doc__": f"{plain.__name__} whose sublayers read and write a depth stream.",
            "_auto_class": None,
            "config_class": config,
            "__annotations__": {"config": config},
            "family": family,
        },
    )
    globals()[cls.__name__] = cls
    return cls


def register(key: str, family: Family, base_config: type, base_model: Any) -> tuple[type, type]:
    """Make a family's config and model class: `attnres_{key}` to the Auto classes, `key` in `CLASSES`."""
    config = type(
        f"AttnRes{base_config.__name__}",
        (ResidualConfigMixin, base_config),
        {
            "__module__": __name__,
            "__doc__": f"{base_config.__name__} with a residual: `residual`, `residual_settings`.",
            "__annotations__": {"residual": str, "residual_settings": dict | None, "residual_file": str | None},
            "_auto_class": None,  # of code that came with a model; this class did not
            "model_type": f"attnres_{key}",
            "residual": "block",
            "residual_settings": None,
            "residual_file": None,
            "sublayers": family.sublayers,
        },
    )
    model = type(
        f"AttnRes{base_model.__name__}",
        (DepthMixin, base_model),
        {
            "__module__": __name__,
            "__doc__": f"{base_model.__name__} whose sublayers read and write a depth stream.",
            "_auto_class": None,
            "config_class": config,
            "__annotations__": {"config": config},
            "family": family,
            "plain_class": base_model,
            "forward": _routing_forward(base_model.forward),
        },
    )
    AutoConfig.register(f"attnres_{key}", config)
    AutoModelForCausalLM.register(config, model)
    plain_base = cast(Any, MODEL_MAPPING).get(base_config, None)
    if isinstance(plain_base, type):
        AutoModel.register(config, _base_class(plain_base, family, config))
    # Checkpoints whose names or layout Transformers changes while loading (experts, say) are found by type of model.
    mapping = get_checkpoint_conversion_mapping(base_model.__name__)
    mapping = mapping or get_checkpoint_conversion_mapping(getattr(base_config, "model_type", ""))
    prefix = base_model.base_model_prefix
    # In a file the residual stands at the top, "residual.query", as it did when it belonged to the head.
    mapping = [*(mapping or []), WeightRenaming(r"^residual\.", f"{prefix}.residual.")]
    register_checkpoint_conversion_mapping(f"attnres_{key}", mapping, overwrite=True)
    tokenizer = TOKENIZER_MAPPING_NAMES.get(getattr(base_config, "model_type", ""))
    if tokenizer is not None:
        TOKENIZER_MAPPING_NAMES[f"attnres_{key}"] = tokenizer
    # Importable by name, as pickling and `from attnres.models.classes import AttnResQwen3Config` expect.
    globals()[config.__name__], globals()[model.__name__] = config, model
    CLASSES[key] = config, model
    return config, model


CLASSES: dict[str, tuple[type, Any]] = {}
for _key, _family in FAMILIES.items():
    if hasattr(transformers, _family.causal_lm):  # older versions lack the newer families
        register(_key, _family, getattr(transformers, _family.config), getattr(transformers, _family.causal_lm))


def register_stored(config: Mapping[str, Any], folder: Path, *, trust_remote_code: bool = False) -> None:
    """Make what a stored model needs beyond this package, from what its config.json says: the classes of a family that
    was probed, and the mechanism of a user's own file, where code is trusted.

    Raises:
        UserError: the config does not say, names classes that are not there, or needs code that was not trusted.
    """
    file = config.get("residual_file")
    if file and trust_remote_code and not is_known(str(config.get("residual"))):
        residual_class(str(file))
    key = str(config.get("model_type", "")).removeprefix("attnres_")
    stored = config.get("residual_family")
    if key in CLASSES or not isinstance(stored, Mapping):
        return
    stored = dict(stored)
    remote = stored.pop("remote", None)
    if remote and not trust_remote_code:
        raise UserError(
            f"the model in {folder} brings its own code ({remote['causal_lm']}), which is not run unasked: read it, "
            "then pass trust_remote_code (--trust-remote-code)"
        )
    try:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
        family = Family(**fields)
        names = remote or {}
        base_config, base_model = (
            get_class_from_dynamic_module(names[kind], folder) if kind in names else getattr(transformers, plain)
            for kind, plain in (("config", family.config), ("causal_lm", family.causal_lm))
        )
        if not issubclass(base_model, PreTrainedModel):
            raise TypeError(f"{family.causal_lm} is no model")
    except (TypeError, AttributeError, KeyError, OSError, ImportError) as error:
        raise UserError(f"the model in {folder} has a family that cannot be made here ({error})") from error
    register(key, family, base_config, base_model)
