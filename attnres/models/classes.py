"""Config and model classes with depth reads, a config, a base model and its heads for each family, registered with
Transformers' Auto classes.

Each is a subclass of the family's own class. The residual and its settings are fields of the config; its parameters are
one module of the base model (`model.model.residual`, also `model.residual`). Every other weight keeps its name, so
plain checkpoints load directly.
"""

import functools
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from attnres.errors import UserError
from attnres.files import write_text
from attnres.models.attach import attach_stream
from attnres.models.card import model_card
from attnres.models.families import FAMILIES, Family, layer_count
from attnres.models.inputs import Fused, split
from attnres.models.neighbours import keep_from_decay, share_defaults
from attnres.models.outputs import note_hidden_states, routing_forward, show_hidden_states
from attnres.models.remote import write_loader
from attnres.ops import compute_dtype
from attnres.residuals import (
    RESIDUALS,
    Residual,
    make_residual,
    residual_class,
    settings_of,
    source_file,
    source_sha256,
)
from attnres.residuals.registry import is_known
from attnres.residuals.values import ValueResidual

AUTOS: tuple[Any, ...] = tuple(
    getattr(transformers, f"AutoModel{head}")
    for head in (
        "",
        "ForCausalLM",
        "ForMaskedLM",
        "ForSeq2SeqLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForImageClassification",
        "ForImageTextToText",
        "ForSpeechSeq2Seq",
        "ForAudioClassification",
        "ForCTC",
    )
)
"""Transformers' Auto classes: a family's classes are registered with those that have the plain ones."""


FIELDS: dict[str, Any] = {
    "residual": str,
    "residual_settings": dict | None,
    "residual_file": str | None,
    "residual_sha256": str | None,
}
"""What makes a config ours, with types."""


class ResidualConfigMixin:
    """Config fields `residual` (a mechanism's name), `residual_settings` (its settings), and, for a mechanism of a
    user's own file, `residual_file` and `residual_sha256` (of its content), which are there to be told: a config runs
    no file."""

    residual: str
    residual_settings: dict[str, Any] | None
    residual_file: str | None
    residual_sha256: str | None
    family: Family

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: this class did not come with a model, whatever file of a model it was found through."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        plain = config_dict.get("model_type")
        if plain and not str(plain).startswith("attnres_") and "residual" not in config_dict:
            warnings.warn(
                f"a plain '{plain}' checkpoint is loaded into {cls.__name__}: it gets residual '{cls.residual}' with "
                "fresh parameters, and computes something else than before; attnres.convert keeps what it computes",
                stacklevel=2,
            )
            stray = stray_settings(cls, config_dict)
            config_dict = {name: value for name, value in config_dict.items() if name not in stray}
        return super().from_dict(config_dict, **kwargs)  # ty: ignore[missing-attribute]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty_config, (self.stored,), vars(self)

    @property
    def stored(self) -> dict[str, Any]:
        """What `register_stored` needs of config.json."""
        cls: Any = type(self)
        return {"model_type": cls.model_type, "residual_family": getattr(self, "residual_family", None)}

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write config.json, and beside it the file with which Transformers finds these classes by itself."""
        auto_map = write_loader(self, Path(save_directory), auto_classes(type(self)))
        if auto_map:
            self.auto_map = auto_map
        super().save_pretrained(save_directory, **kwargs)  # ty: ignore[missing-attribute]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # ty: ignore[missing-attribute]
        self._refuse_stray_settings(kwargs)
        self.note_file()
        with torch.device("meta"):
            self.make_residual()

    def _refuse_stray_settings(self, kwargs: Mapping[str, Any]) -> None:
        """A residual's setting among the fields of the config would be kept there and change nothing."""
        if stray := stray_settings(type(self), {*kwargs, *vars(self)}):
            raise UserError(f"config field '{stray[0]}' is a setting of a residual: put it into residual_settings")

    def note_file(self) -> None:
        """Record the file that the mechanism was read from; warn where the stored one had another content."""
        file, content = source_file(self.residual), source_sha256(self.residual)
        if file is None:
            return
        if self.residual_sha256 not in (None, content):
            warnings.warn(
                f"{file} has changed since this model was made (its SHA-256 is another): if more than comments "
                "changed, the model computes something else",
                stacklevel=2,
            )
        self.residual_file, self.residual_sha256 = file, content

    def make_residual(self) -> Residual:
        if ".py:" in self.residual:
            raise UserError(
                f"residual is '{self.residual}' in a config, which runs no file: register the class first "
                "(attnres.register) and give its name"
            )
        residual_class(self.residual, self.residual_file)
        layers, kinds = cast(int, layer_count(self)), self.family.sublayers
        width = self.layers_config.hidden_size
        settings = self.residual_settings or {}
        residual = make_residual(self.residual, layers * len(kinds), width, sublayers=kinds, **settings)
        if residual.value_kind != "none":
            residual.value_mix = ValueResidual(residual.value_kind, layers, self.shared_heads, width)
        return residual

    @property
    def layers_config(self) -> Any:
        """The config of the layers that have the residual: of a model of more than text or more than a decoder, that of
        its text's decoder."""
        return self.get_text_config(decoder=True)  # ty: ignore[missing-attribute]

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values, which several of queries may share."""
        return getattr(self.layers_config, "num_key_value_heads", None) or self.layers_config.num_attention_heads


def stray_settings(config: type, names: Iterable[str]) -> list[str]:
    """Return those of `names` that some residual's setting has and no field of this class of configs: no model of
    Transformers' own looks at them."""
    fields = {name for cls in config.__mro__ for name in vars(cls).get("__annotations__", {})}
    constructors = [vars(cls)["__init__"] for cls in config.__mro__ if "__init__" in vars(cls)]
    fields |= {name for one in constructors for name in inspect.signature(one).parameters}
    settings = {key for name in list(RESIDUALS) for key in settings_of(name)} - fields
    return sorted(settings & {*names})


def _refuse_parallel(family: Family, config: Any) -> None:
    if family.parallel and getattr(config, family.parallel):
        raise UserError(
            f"{family.parallel} is on: attention and MLP read one stream side by side, and depth reads need them one "
            f"after the other; only models with {family.parallel}=False have a place for them"
        )


class Depth(PreTrainedModel):
    """What base models and heads with a depth stream share; mixed in front of the family's own class."""

    family: Family
    plain_class: type[PreTrainedModel]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: this class did not come with a model, whatever file of a model it was found through."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """As the plain class: custom code would have modules without parameters left as they were allocated."""
        return cls.plain_class.is_custom_code()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """As the plain class: Transformers looks for it in the file of a class, which is not the family's here."""
        return cls.plain_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the plain class, or a mixture of experts would run them one by one."""
        return cls.plain_class._can_set_experts_implementation()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        config: Any = self.config
        return _empty_model, (config.stored, self.plain_class, isinstance(self, DepthBase)), self.__dict__

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
        """Write the model as Transformers does, and no card: for a caller that writes the card itself."""
        super().save_pretrained(folder, max_shard_size=max_shard_size)

    @property
    def depth_base(self) -> nn.Module:
        """The module that holds the layers, the final norm and the residual."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def depth_layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.depth_base.get_submodule(self.family.layers))

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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        residual = self.depth_base._modules.get("residual")
        if isinstance(module, ValueResidual):
            module.init_parameters()
        elif residual is not None and module in residual.modules():
            tensors = (*residual.parameters(), *residual.buffers())
            if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
                cast(Residual, residual).init_parameters()  # which spares what was loaded
        else:
            super()._init_weights(module)

    def attach_residual(self) -> None:
        """Make the base model one of depth streams, unless it is; see `attach_residual`."""
        base = self.depth_base
        if base is not self and isinstance(base, DepthBase):
            return
        if base is not self and isinstance(base, PreTrainedModel):
            cls = model_class(type(base), self.family, type(self.config), DepthBase)
            # Transformers notes in this constructor what a class records (`output_hidden_states`, say).
            PreTrainedModel.__init__(object.__new__(cls), self.config)
            base.__class__ = cls
        attach_residual(base, self.family, self.config)


class DepthBase(Depth):
    """A base model (without a head) whose hidden state is a depth stream."""

    residual: nn.Module

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_parallel(self.family, config)
        super().__init__(config, *args, **kwargs)
        self.attach_residual()


def attach_residual(base: nn.Module, family: Family, config: Any) -> None:
    """Make the residual's parameters, and let the layers of `base` read and write a stream."""
    layers = cast(nn.ModuleList, base.get_submodule(family.layers))
    with torch.device(next(layers[0].parameters()).device):
        residual = config.make_residual().to(compute_dtype(torch.get_default_dtype()))
    _split_inputs(layers, family, residual, config)
    banked = family.causal_lm.endswith(("ForCausalLM", "LMHeadModel"))
    attach_stream(base, residual, list(layers), family.reads, family.final_norm, normed=family.normed, banked=banked)
    base.register_forward_pre_hook(note_hidden_states, with_kwargs=True)
    base.register_forward_hook(show_hidden_states)
    holder = base.get_submodule(family.layers.rpartition(".")[0])
    if holder is not base:
        holder.register_forward_hook(show_hidden_states)


def _split_inputs(layers: nn.ModuleList, family: Family, residual: Residual, config: Any) -> None:
    """Let attentions take inputs for each of their projections, where the residual gives them such."""
    name = residual.name
    several = any(isinstance(way, str) for index in range(residual.num_sublayers) for way in residual.ways(index))
    values = residual.value_mix
    if several or values is not None:
        what = f"residual '{name}'" if several else f"value_residual '{cast(ValueResidual, values).kind}'"
        fused = Fused(config.layers_config.num_attention_heads, config.shared_heads, family.by_head)
        split(list(layers), family.projections, fused, what, family.causal_lm)
    if values is not None and values.replaces and len(family.projections) > 1:
        for layer in list(layers)[1:]:
            layer.get_submodule(family.projections[-1]).requires_grad_(False)


class DepthMixin(Depth):
    """A model with a head whose hidden state is a depth stream."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_parallel(self.family, config)
        super().__init__(config, *args, **kwargs)
        self.attach_residual()
        self._scale_branches()

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

    def _load_from_state_dict(  # ty: ignore[incompatible-method-override]
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Take the residual under its name in a file too, as those do that load one into a model that is there
        (Transformers' `Trainer` when it resumes)."""
        if self.depth_base is not self:
            for name in [name for name in state_dict if name.startswith(f"{prefix}residual.")]:
                place = f"{prefix}{self.base_model_prefix}.{name.removeprefix(prefix)}"
                state_dict.setdefault(place, state_dict.pop(name))
        super()._load_from_state_dict(state_dict, prefix, *args)

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


@functools.cache
def model_class(plain: Any, family: Family, config: type, kind: type[Depth]) -> type[Depth]:
    """Return the subclass of a plain model class that is a `DepthBase` or a `DepthMixin`."""
    fields = {
        "__module__": __name__,
        "__doc__": f"{plain.__name__} whose sublayers read and write a depth stream.",
        "_auto_class": None,
        "config_class": config,
        "__annotations__": {"config": config},
        "family": family,
        "plain_class": plain,
        "_pp_plan": None,  # as the config's
        "_keep_in_fp32_modules_strict": [*(plain._keep_in_fp32_modules_strict or ()), "residual"],
    }
    if kind is DepthMixin:
        fields["forward"] = routing_forward(plain.forward)
    cls = type(f"AttnRes{plain.__name__}", (kind, plain), fields)
    globals()[cls.__name__] = cls
    return cls


def _plain_classes(config: type) -> Iterator[tuple[Any, type[PreTrainedModel]]]:
    """Yield the Auto classes that know a plain config, with the model class that each has for it."""
    for auto in AUTOS:
        plain = auto._model_mapping.get(config, None)
        plain = plain[0] if isinstance(plain, tuple) else plain
        if isinstance(plain, type) and issubclass(plain, PreTrainedModel) and issubclass(config, plain.config_class):
            yield auto, plain


def auto_classes(config: type) -> dict[str, str]:
    """Return the name of the class that each Auto class has for a config with a residual."""
    classes = {auto.__name__: auto._model_mapping.get(config, None) for auto in AUTOS}
    return {"AutoConfig": config.__name__} | {auto: cls.__name__ for auto, cls in classes.items() if cls is not None}


def register(key: str, family: Family, base_config: type, base_model: Any) -> tuple[type, type]:
    """Make a family's config, base model and heads: `attnres_{key}` to the Auto classes, `key` in `CLASSES`, which has
    the config and the class for `base_model`."""
    config = type(
        f"AttnRes{base_config.__name__}",
        (ResidualConfigMixin, base_config),
        {
            "__module__": __name__,
            "__doc__": f"{base_config.__name__} with a residual: `residual`, `residual_settings`.",
            "__annotations__": FIELDS,
            "_auto_class": None,
            "base_model_pp_plan": None,  # a stage of which would hand on one tensor, and a stream is several
            "model_type": f"attnres_{key}",
            **dict.fromkeys(FIELDS),
            "residual": "block",
            "family": family,
        },
    )
    AutoConfig.register(f"attnres_{key}", config)
    share_defaults(f"attnres_{key}", getattr(base_config, "model_type", ""))
    plain_classes = dict(_plain_classes(base_config))
    if base_model not in plain_classes.values():  # code that comes with a model, a part of another
        plain_classes = {AutoModelForCausalLM if hasattr(base_model, "generate") else AutoModel: base_model}
    for auto, plain in plain_classes.items():
        auto.register(config, model_class(plain, family, config, DepthBase if auto is AutoModel else DepthMixin))
    is_base = plain_classes.get(AutoModel) is base_model
    model = model_class(base_model, family, config, DepthBase if is_base else DepthMixin)
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
    # Importable by name, as `from attnres.models.classes import AttnResQwen3Config` expects.
    globals()[config.__name__] = config
    CLASSES[key] = config, model
    return config, model


keep_from_decay()
CLASSES: dict[str, tuple[type, Any]] = {}
for _key, _family in FAMILIES.items():
    if hasattr(transformers, _family.causal_lm):  # older versions lack the newer families
        register(_key, _family, getattr(transformers, _family.config), getattr(transformers, _family.causal_lm))


def _empty_config(stored: dict[str, Any]) -> Any:
    """Return an empty config of a stored model's class: what unpickling fills, in a process that has to register it."""
    register_stored(stored, Path())
    return object.__new__(CLASSES[stored["model_type"].removeprefix("attnres_")][0])


def _empty_model(stored: dict[str, Any], plain: type[PreTrainedModel], is_base: bool) -> Depth:
    """Return an empty model of ours of a plain class, as `_empty_config` does."""
    register_stored(stored, Path())
    config, main = CLASSES[stored["model_type"].removeprefix("attnres_")]
    return object.__new__(model_class(plain, main.family, config, DepthBase if is_base else DepthMixin))


def register_stored(config: Mapping[str, Any], folder: Path, *, trust_remote_code: bool = False) -> dict[str, type]:
    """Make what a stored model needs beyond this package, from what its config.json says: the classes of a family that
    was probed, and the mechanism of a user's own file, where code is trusted.

    Returns:
        Its classes by name, config, base model and heads.

    Raises:
        UserError: the config does not say, names classes that are not there, or needs code that was not trusted.
    """
    file = config.get("residual_file")
    here = bool(file) and Path(str(file).rpartition(":")[0]).is_file()  # else the model says what it needs
    if here and trust_remote_code and not is_known(str(config.get("residual"))):
        residual_class(str(file))
    key = str(config.get("model_type", "")).removeprefix("attnres_")
    stored = config.get("residual_family")
    if key not in CLASSES and isinstance(stored, Mapping):
        _register_probed(key, dict(stored), folder, trust_remote_code=trust_remote_code)
    if key not in CLASSES:
        return {}
    return {name: globals()[name] for name in auto_classes(CLASSES[key][0]).values()}


def _register_probed(key: str, stored: dict[str, Any], folder: Path, *, trust_remote_code: bool) -> None:
    remote = stored.pop("remote", None)
    if remote and not trust_remote_code:
        raise UserError(
            f"the model in {folder} brings its own code ({remote['causal_lm']}), which is not run unasked: read it, "
            "then pass trust_remote_code to attnres.load (--trust-remote-code)"
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
