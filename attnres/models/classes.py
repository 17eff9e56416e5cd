"""Config and model classes with depth reads (a config, a base model and its heads for each family), registered with
Transformers' Auto classes.

Each is a subclass of the family's own class. The residual and its settings are fields of the config; its parameters are
one module of the base model (`model.model.residual`, also `model.residual`). Every other weight keeps its name, so
plain checkpoints load directly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from attnres.errors import UserError
from attnres.models.bases import GENERATED, Depth, DepthBase, DepthMixin, class_of, model_class, plain_class
from attnres.models.config import AUTOS, FIELDS, ResidualConfigMixin, auto_classes
from attnres.models.families import FAMILIES, Family
from attnres.residuals import residual_class
from attnres.residuals.registry import is_known
from attnres.streams.neighbours import share_defaults


def __getattr__(name: str) -> type:
    """Return a generated class, for `from attnres.models.classes import AttnResQwen3Config` and for pickles."""
    if name not in GENERATED:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return GENERATED[name]


def register(key: str, family: Family, base_config: type, base_model: Any) -> tuple[type, type]:
    """Generate a family's config, base model and heads, register `attnres_{key}` with the Auto classes, and store the
    config and the class for `base_model` in `CLASSES` under `key`."""
    config = type(
        f"AttnRes{base_config.__name__}",
        (ResidualConfigMixin, base_config),
        {
            "__module__": __name__,
            "__doc__": f"{base_config.__name__} with a residual: `residual`, `residual_settings`.",
            "__annotations__": FIELDS,
            "_auto_class": None,
            "base_model_pp_plan": None,  # a stage of it would pass on one tensor, but a stream is several
            "model_type": f"attnres_{key}",
            **dict.fromkeys(FIELDS),
            "residual": "block",
            "family": family,
            "empty": staticmethod(_empty_config),
            "empty_model": staticmethod(_empty_model),
        },
    )
    AutoConfig.register(f"attnres_{key}", config)
    share_defaults(f"attnres_{key}", getattr(base_config, "model_type", ""))
    plain_classes: dict[Any, Any] = {auto: cls for auto in AUTOS if (cls := plain_class(auto, base_config)) is not None}
    # for code that comes with a model, one Auto class may have another part of it
    if base_model not in plain_classes.values():
        plain_classes = {AutoModelForCausalLM if hasattr(base_model, "generate") else AutoModel: base_model}
    for auto, plain in plain_classes.items():
        auto.register(config, class_of(plain, config))
    model = class_of(base_model, config)
    # Transformers finds checkpoints whose names or layout it changes while loading (experts, say) by model type.
    mapping = get_checkpoint_conversion_mapping(base_model.__name__)
    mapping = mapping or get_checkpoint_conversion_mapping(getattr(base_config, "model_type", ""))
    if mapping:
        register_checkpoint_conversion_mapping(f"attnres_{key}", mapping, overwrite=True)
    tokenizer = TOKENIZER_MAPPING_NAMES.get(getattr(base_config, "model_type", ""))
    if tokenizer is not None:
        TOKENIZER_MAPPING_NAMES[f"attnres_{key}"] = tokenizer
    GENERATED[config.__name__] = config
    CLASSES[key] = config, model
    return config, model


def _empty_config(stored: dict[str, Any]) -> Any:
    """Return an empty config of a stored model's class, for unpickling in a process that has not registered it."""
    register_stored(stored, Path())
    return object.__new__(CLASSES[stored["model_type"].removeprefix("attnres_")][0])


def _empty_model(stored: dict[str, Any], plain: type[PreTrainedModel], is_base: bool) -> Depth:
    """Return an empty model of this package's class for a plain class, as `_empty_config` does."""
    register_stored(stored, Path())
    config = CLASSES[stored["model_type"].removeprefix("attnres_")][0]
    return object.__new__(model_class(plain, config, DepthBase if is_base else DepthMixin))


def _registered_kimi_k3() -> Any:
    """Return the module of Kimi K3's plain classes, once Transformers' Auto classes have them."""
    from attnres.models import kimi

    if "kimi_k3" not in CONFIG_MAPPING:  # a later version of Transformers may have its own
        AutoConfig.register("kimi_k3", kimi.KimiK3Config)
    AutoModel.register(kimi.KimiK3Config, kimi.KimiK3Model, exist_ok=True)
    AutoModelForCausalLM.register(kimi.KimiK3Config, kimi.KimiK3ForCausalLM, exist_ok=True)
    register_checkpoint_conversion_mapping("kimi_k3", get_checkpoint_conversion_mapping("kimi_linear"), overwrite=True)
    return kimi


CLASSES: dict[str, tuple[type, Any]] = {}
for _key, _family in FAMILIES.items():
    _home: Any = transformers
    if _key == "kimi_k3" and hasattr(transformers, "KimiLinearForCausalLM"):
        _home = _registered_kimi_k3()
    if hasattr(_home, _family.causal_lm):  # older versions lack the newer families
        register(_key, _family, getattr(_home, _family.config), getattr(_home, _family.causal_lm))


def register_stored(config: Mapping[str, Any], folder: Path, *, trust_remote_code: bool = False) -> dict[str, type]:
    """Register the classes that a stored model needs, named in its config.json: those of a probed family and, if code
    is trusted, the mechanism from a user's file.

    Returns:
        The generated classes by name: config, base model and heads.

    Raises:
        UserError: the config names no family or missing classes, needs code that was not trusted, or has another
            family's name.
    """
    file = config.get("residual_file")
    has_file = bool(file) and Path(str(file).rpartition(":")[0]).is_file()  # otherwise the model raises what it needs
    if has_file and trust_remote_code and not is_known(str(config.get("residual"))):
        residual_class(str(file))
    key = str(config.get("model_type", "")).removeprefix("attnres_")
    stored = config.get("residual_family")
    if isinstance(stored, Mapping):
        if key not in CLASSES:
            _register_probed(key, stored, folder, trust_remote_code=trust_remote_code)
        family = CLASSES[key][1].family
        if _family_of(stored, folder).places != family.places:
            raise UserError(
                f"the model in {folder} is of type 'attnres_{key}' with the layers of {stored['causal_lm']}, and this "
                f"process has the type with those of {family.causal_lm}: load the two in separate processes, or "
                "convert the plain model again, which gives it another type"
            )
    if key not in CLASSES:
        return {}
    return {cls.__name__: cls for cls in auto_classes(CLASSES[key][0]).values()}


def _family_of(stored: Mapping[str, Any], folder: Path) -> Family:
    """Return the family that a config.json describes."""
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    fields.pop("remote", None)
    try:
        return Family(**fields)
    except TypeError as error:
        raise _unmade(folder, error) from error


def _unmade(folder: Path, error: Exception) -> UserError:
    return UserError(f"the model in {folder} has a family that cannot be used here ({error})")


def _register_probed(key: str, stored: Mapping[str, Any], folder: Path, *, trust_remote_code: bool) -> None:
    names = stored.get("remote") or {}
    if names and not trust_remote_code:
        raise UserError(
            f"the model in {folder} brings its own code ({names['causal_lm']}), which is not run unasked: read it, "
            "then pass trust_remote_code to attnres.load (--trust-remote-code)"
        )
    family = _family_of(stored, folder)
    try:
        base_config, base_model = (
            get_class_from_dynamic_module(names[kind], folder) if kind in names else getattr(transformers, plain)
            for kind, plain in (("config", family.config), ("causal_lm", family.causal_lm))
        )
        if not issubclass(base_model, PreTrainedModel):
            raise TypeError(f"{family.causal_lm} is no model")
    except (TypeError, AttributeError, KeyError, OSError, ImportError) as error:
        raise _unmade(folder, error) from error
    register(key, family, base_config, base_model)
