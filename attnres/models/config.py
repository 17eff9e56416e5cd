"""Configs with a residual, which store the mechanism and its settings, and the files written beside them: the loader
with which Transformers finds this package's classes, and the model card."""

import inspect
import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from attnres.errors import UserError
from attnres.hub import is_hub_name
from attnres.models.families import Family, layer_count
from attnres.ops import compute_dtype
from attnres.residuals import (
    RESIDUALS,
    Residual,
    changed_settings,
    make_residual,
    residual_class,
    settings_in_full,
    settings_of,
    source_file,
    source_sha256,
)
from attnres.residuals.registry import is_known
from attnres.residuals.values import ValueResidual
from attnres.text import with_settings

AUTOS: tuple[Any, ...] = tuple(
    getattr(transformers, name)
    for name in dir(transformers)
    if name == "AutoModel" or (name.startswith("AutoModelFor") and name != "AutoModelForTextEncoding")
)
"""Transformers' Auto classes with which a family is registered if they have its plain classes. The omitted one has the
models of `AutoModel`, or parts of them."""


def auto_classes(config: type) -> dict[str, type]:
    """Return the model class for each Auto class, given a config class with a residual."""
    classes = {auto.__name__: auto._model_mapping.get(config, None) for auto in AUTOS}
    return {"AutoConfig": config} | {auto: cls for auto, cls in classes.items() if cls is not None}


FIELDS: dict[str, Any] = {
    "residual": str,
    "residual_settings": dict | None,
    "residual_file": str | None,
    "residual_sha256": str | None,
}
"""Fields (and their types) that a config of this package adds."""


class ResidualConfigMixin:
    """Config fields `residual` (a mechanism's name), `residual_settings` (its settings), and, for a mechanism from a
    user's file, `residual_file` and `residual_sha256` (of its content). The last two are information only: a config
    never runs a file."""

    residual: str
    residual_settings: dict[str, Any] | None
    residual_file: str | None
    residual_sha256: str | None
    family: Family
    empty: Callable[..., Any]
    empty_model: Callable[..., Any]
    """Function that makes an empty config or model for unpickling: see `classes`."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: no file of a model defines this class, whatever file of a model it was found through."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        plain = config_dict.get("model_type")
        if plain and not str(plain).startswith("attnres_") and "residual" not in config_dict:
            warnings.warn(
                f"a plain '{plain}' checkpoint is loaded into {cls.__name__}: it gets residual '{cls.residual}' with "
                "new parameters, and its outputs change; attnres.convert keeps them",
                stacklevel=2,
            )
            stray = stray_settings(cls, config_dict)
            config_dict = {name: value for name, value in config_dict.items() if name not in stray}
        if config_dict.get("residual_settings") and is_known(str(config_dict.get("residual"))):
            settings = changed_settings(config_dict["residual"], config_dict["residual_settings"])
            config_dict = {**config_dict, "residual_settings": settings}
        return super().from_dict(config_dict, **kwargs)  # ty: ignore[missing-attribute]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for config.json, with every setting of the residual, so that a later change of a default
        does not change a saved model."""
        values = super().to_dict()  # ty: ignore[missing-attribute]
        if is_known(self.residual):
            values["residual_settings"] = settings_in_full(self.residual, self.residual_settings)
        return values

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.empty, (self.stored,), vars(self)

    @property
    def stored(self) -> dict[str, Any]:
        """Return the entries of config.json that `register_stored` needs."""
        cls: Any = type(self)
        return {"model_type": cls.model_type, "residual_family": getattr(self, "residual_family", None)}

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write config.json, and beside it the file with which Transformers finds these classes by itself."""
        names = {auto: cls.__name__ for auto, cls in auto_classes(type(self)).items()}
        auto_map = write_loader(self, Path(save_directory), names)
        if auto_map:
            self.auto_map = auto_map
        super().save_pretrained(save_directory, **kwargs)  # ty: ignore[missing-attribute]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # ty: ignore[missing-attribute]
        if stray := stray_settings(type(self), {*kwargs, *vars(self)}):  # it would be stored without effect
            raise UserError(f"config field '{stray[0]}' is a setting of a residual: put it into residual_settings")
        self.note_file()
        with torch.device("meta"):
            self.make_residual()

    def note_file(self) -> None:
        """Record the file from which the mechanism was read; warn if its content differs from the stored one."""
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
        # with the default written out: a loaded model uses the read_scale of its config.json, and needs no warning
        # about it
        settings = settings_in_full(self.residual, self.residual_settings)
        residual = make_residual(self.residual, layers * len(kinds), width, sublayers=kinds, **settings)
        if residual.value_kind != "none":
            mix = ValueResidual(residual.value_kind, layers, self.shared_heads, width)
            residual.value_mix = mix.to(compute_dtype(torch.get_default_dtype()))
        return residual

    @property
    def layers_config(self) -> Any:
        """Return the config of the layers that have the residual: for a model with several parts, that of its text
        decoder."""
        return self.get_text_config(decoder=True)  # ty: ignore[missing-attribute]

    @property
    def shared_heads(self) -> int:
        """Return the number of key and value heads, which several query heads may share."""
        return getattr(self.layers_config, "num_key_value_heads", None) or self.layers_config.num_attention_heads


def stray_settings(config: type, names: Iterable[str]) -> list[str]:
    """Return the `names` that are settings of a residual but no fields of this config class: no model of Transformers
    reads them."""
    settings = {key for name in list(RESIDUALS) for key in settings_of(name)} - field_names(config)
    return sorted(settings & {*names})


def field_names(config: type) -> set[str]:
    """Return the names of a config class's fields and of its constructors' parameters."""
    fields = {name for cls in config.__mro__ for name in vars(cls).get("__annotations__", {})}
    constructors = [vars(cls)["__init__"] for cls in config.__mro__ if "__init__" in vars(cls)]
    return fields | {name for one in constructors for name in inspect.signature(one).parameters}


LOADER = "modeling_attnres"

_LOADER_TEXT = '''"""Attention Residuals: the classes of this model are those of the package attnres."""

try:
    from attnres.models.classes import register_stored
except ImportError as error:
    raise ImportError("a model with Attention Residuals needs the package attnres: pip install attnres") from error

import json

CONFIG = json.loads({config!r})

globals().update(register_stored(CONFIG, __file__, trust_remote_code=True))  # this file runs where code is trusted
'''


def write_loader(config: Any, folder: Path, classes: dict[str, str]) -> dict[str, str]:
    """Write the loader file into `folder`, and return the `auto_map` of config.json: empty if the plain model itself
    comes with code, which must be trusted first.

    Args:
        config: the model's config; for a probed family it says where a layer is read.
        classes: Auto class -> the name of this package's class.
    """
    family = getattr(config, "residual_family", None)
    if family and family.get("remote"):
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    stored = config.stored
    if config.residual_file:
        stored |= {"residual": config.residual, "residual_file": config.residual_file}
    (folder / f"{LOADER}.py").write_text(_LOADER_TEXT.format(config=json.dumps(stored)), encoding="utf-8")
    return {auto: f"{LOADER}.{name}" for auto, name in classes.items()}


def model_card(model: Any, source: str | None, report: Any = None, *, reloaded: bool = False) -> str:
    """Return the text of README.md.

    Args:
        model: a model with depth reads, in memory.
        source: the model that it was converted from; None if it was trained from scratch.
        report: the report of the conversion, if there was one.
        reloaded: whether the written model was loaded and compared.
    """
    config, name = model.config, type(model).__name__
    residual = with_settings(f"`{config.residual}`", config.residual_settings)
    names = reversed((getattr(config, "auto_map", None) or {}).items())
    auto = next((auto for auto, cls in names if cls.endswith(f".{name}")), "AutoModel")
    head = ["---", "library_name: transformers", "tags:", "- attnres", "- attention-residuals"]
    on_hub = source is not None and "/" in source and is_hub_name(source) and not Path(source).exists()
    head += [f"base_model: {source}"] if on_hub else []
    lines = [
        *head,
        "---",
        "",
        f"# {name}",
        "",
        f"{model.plain_class.__name__} with residual {residual}: each sublayer reads a mixture of earlier outputs "
        "instead of their plain sum (Attention Residuals, arXiv 2603.15031)."
        + (f" Made from {source}." if source else ""),
        "",
        "```python",
        f"from transformers import {auto}      # pip install attnres",
        "",
        f'model = {auto}.from_pretrained("this folder", trust_remote_code=True)',
        "```",
        "",
        "or `attnres.load(folder)`. `modeling_attnres.py` only imports attnres. The plain class of Transformers would "
        "leave the residual's parameters out and compute something else.",
    ]
    if report is not None:
        reload = ", and loading what was written gave the same outputs again. `conversion.json` has the details"
        lines += [
            "",
            f"When it was made, its outputs differed from the source's by at most {report['max_difference']:.2g} of "
            f"{report['logit_scale']:.3g} ({report['arithmetic']}, {report['tokens']} tokens){reload * reloaded}.",
        ]
    return "\n".join(lines) + "\n"
