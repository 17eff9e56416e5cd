"""Residual mechanisms by name: those of the package, and those in users' files."""

import functools
import inspect
import os
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch

from attnres.errors import UserError, unknown
from attnres.imports import from_file
from attnres.ops import compute_dtype
from attnres.residuals.base import Residual
from attnres.residuals.layout import Traits
from attnres.residuals.mechanisms import MECHANISMS
from attnres.residuals.mechanisms.compose import Compose
from attnres.residuals.queries import QUERY_LR, Queried
from attnres.residuals.values import VALUE_KINDS

PLUGINS = "ATTNRES_RESIDUALS"
"""Environment variable: FILE.py:CLASS entries, separated by ";", that are registered when a name is looked up."""

_MECHANISMS: dict[str, type[Residual]] = {mechanism.name: mechanism for mechanism in MECHANISMS}
_FILES: dict[str, tuple[str, str]] = {}
"""Name of a mechanism -> the FILE.py:CLASS that it was read from, and the SHA-256 of that file's content."""

RESIDUALS: Mapping[str, type[Residual]] = MappingProxyType(_MECHANISMS)


def register(mechanism: type[Residual]) -> type[Residual]:
    """Make a mechanism known by its `name` to every command and function; usable as a decorator.

    >>> import torch
    >>> @register
    ... class Anchored(Residual):
    ...     '''h_l = sum_{i<l} v_i + v_0: the running sum, and the embedding once more.'''
    ...
    ...     name = "anchored"
    ...     traits = Traits(by_token=False, sums_to_one=False, has_query=False, starts_standard=False)
    ...
    ...     def start(self, embedding):
    ...         return embedding, embedding
    ...
    ...     def read(self, state, index, norm):
    ...         return self.normed(state[0] + state[1], index, norm), state
    ...
    ...     def write(self, state, index, output):
    ...         return state[0] + output, state[1]
    ...
    ...     def hidden_state(self, state):
    ...         return state[0]
    ...
    ...     def implied(self, read):
    ...         return torch.tensor([2.0] + [1.0] * read)
    >>> read = make_residual("anchored", num_sublayers=4, width=8).layout()[2]
    >>> read.name, [source.name for source in read.sources]
    ('attention 1', ['embedding', 'attention 0', 'mlp 0'])

    `attnres check` tells whether it satisfies the interface. A class in a separate file need not be registered:
    commands take FILE.py:CLASS, and the environment variable ATTNRES_RESIDUALS names such files.

    Registering another class under the same name replaces the earlier one; names of the package's mechanisms are
    refused.

    Raises:
        UserError: no subclass of Residual, or one without `name`, `traits` or a required method.
    """
    if not (isinstance(mechanism, type) and issubclass(mechanism, Residual)):
        raise UserError(f"{mechanism!r} is no mechanism: expected a subclass of attnres.Residual")
    name, label = getattr(mechanism, "name", None), mechanism.__name__
    if not isinstance(name, str) or not name.isidentifier():
        raise UserError(f"class {label} has the name {name!r}: give it a class attribute `name` of letters and _")
    if not isinstance(getattr(mechanism, "traits", None), Traits):
        raise UserError(f"class {label} has no traits: give it a class attribute `traits = Traits(...)`")
    for verb in ("start", "read", "write"):
        if getattr(mechanism, verb) is getattr(Residual, verb):
            raise UserError(f"class {label} does not define {verb}: a mechanism defines start, read and write")
    if ships(name) and _MECHANISMS[name] is not mechanism:
        raise UserError(f"'{name}' is the name of a mechanism of attnres: give class {label} another one")
    _MECHANISMS[name] = mechanism
    return mechanism


def residual_class(name: str, file: str | None = None) -> type[Residual]:
    """Return the mechanism called `name`; for FILE.py:CLASS, import the class from that file and register it under its
    name.

    >>> residual_class("block").__name__
    'Block'

    Args:
        file: the file from which a stored mechanism was read, to name in an error if the name is unknown. It is never
            run.

    Raises:
        UserError: an unknown name, with the nearest valid one; a file that is missing, raises, or lacks the class.
    """
    if ".py:" in name:
        return _from_file(name)
    if name.endswith(".py") or ":" in name:
        raise UserError(f"residual '{name}' is no mechanism's name, nor a class in a file: expected FILE.py:CLASS")
    if is_known(name):
        return _MECHANISMS[name]
    if file is None:
        raise unknown("residual", name, _MECHANISMS)
    raise UserError(
        f"residual '{name}' is in a user's file, {file}, which is not run unasked: read it, then set the "
        f"environment variable {PLUGINS}={shlex.quote(file)}, or load the model by attnres.load with "
        "trust_remote_code=True (--trust-remote-code of the commands that have it)"
    )


def ships(name: str) -> bool:
    """Return whether a mechanism of this name comes with the package."""
    return name in _MECHANISMS and _MECHANISMS[name].__module__.startswith("attnres.residuals.")


def is_known(name: str) -> bool:
    """Return whether a mechanism has this name: one that ships with attnres, was registered, or is in a file that the
    environment variable ATTNRES_RESIDUALS names.

    Raises:
        UserError: such a file is missing, raises, or lacks the class.
    """
    for entry in filter(None, os.environ.get(PLUGINS, "").split(";")):
        if ".py:" not in entry:
            raise UserError(f"the environment variable {PLUGINS} has '{entry}': expected FILE.py:CLASS")
        _from_file(entry)
    return name in _MECHANISMS


def source_file(name: str) -> str | None:
    """Return the FILE.py:CLASS that mechanism `name` was read from; None for one of the package or one registered in
    Python."""
    return _FILES[name][0] if name in _FILES else None


def source_sha256(name: str) -> str | None:
    """Return the SHA-256, at that time, of the file that mechanism `name` was read from; None as in `source_file`."""
    return _FILES[name][1] if name in _FILES else None


def plugins() -> str:
    """Return the value of ATTNRES_RESIDUALS with which another process knows the mechanisms of files that this one has
    read."""
    return ";".join(file for file, _ in _FILES.values())


def traits_of(name: str, stored: Mapping[str, Any] | None = None) -> Traits:
    """Return the traits of a mechanism: the stored ones if given, else those of its class; for an unknown mechanism,
    traits that hide no figure.

    >>> traits_of("full").by_token
    True
    """
    if stored is not None:
        return Traits(**{field: stored[field] for field in Traits._fields if field in stored})
    return _MECHANISMS[name].traits if is_known(name) else Traits(True, False, False, False)


def _from_file(entry: str) -> type[Residual]:
    mechanism, file, content = from_file(
        entry, "class", lambda one: isinstance(one, type) and issubclass(one, Residual) and hasattr(one, "name")
    )
    register(mechanism)
    _FILES[mechanism.name] = file, content
    return mechanism


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings that a residual takes, with their defaults: `value_residual` and `layers` for every residual,
    and `query_lr` for those whose queries train at 0.1 times the learning rate.

    >>> settings_of("rescaled")
    {'value_residual': 'none', 'layers': None}
    """
    mechanism = residual_class(name)
    parameters = [
        p for maker in (mechanism, *mechanism.parts) for p in inspect.signature(maker.__init__).parameters.values()
    ]
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    slow = issubclass(mechanism, Compose) or (issubclass(mechanism, Queried) and mechanism.slow)
    common = {"value_residual": "none"} | ({"query_lr": 1.0} if slow else {})
    return settings | common | ({} if issubclass(mechanism, Compose) else {"layers": None})


def settings_in_full(name: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of a residual: the given ones, and defaults for the others."""
    return settings_of(name) | dict(settings or {})


def changed_settings(name: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings that are not a residual's defaults."""
    defaults = settings_of(name)
    return {key: value for key, value in (settings or {}).items() if key not in defaults or value != defaults[key]}


def switched_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings; for "standard" without those of "block", which it ignores, so that one word of a config
    turns depth reads off."""
    ignored = set(settings_of("block")) - set(settings_of("standard")) if name == "standard" else set()
    return {key: value for key, value in settings.items() if key not in ignored}


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raise a UserError for a setting that residual `name` does not take, with the nearest valid one."""
    valid = settings_of(name)
    for key in settings:
        if key not in valid:
            raise unknown(f"setting of residual '{name}'", key, valid)


def make_residual(
    name: str,
    num_sublayers: int,
    width: int,
    *,
    sublayers: Sequence[str] | None = None,
    value_residual: str = "none",
    query_lr: float | None = 1.0,
    layers: str | None = None,
    **settings: Any,
) -> Residual:
    """Return the residual called `name` for L sublayers of width d.

    >>> make_residual("block", num_sublayers=24, width=64, num_blocks=8).query.shape
    torch.Size([25, 64])

    Args:
        name: name of a mechanism. "standard" ignores settings of "block", so that one word turns depth reads off.
        sublayers: kinds of a layer's sublayers, in order; by default attention and MLP.
        value_residual: how attention values mix with the first layer's (`ValueResidual`). The model creates it, because
            it knows its heads.
        query_lr: learning rate of queries and key gains relative to the optimizer's, by the way they are stored
            (`Queried`). None is 0.1 where they need it; residuals without queries ignore it. With 1.0 the optimizer has
            to train them at 0.1 times its rate: see `attnres.regroup`.

        layers: layers that have this rule ("-2:", "12:24", "::3", "5", "even", "odd"); the others have the standard
            residual (`Compose`). None is all.

    If `read_scale` has its default "mean" and the first pass shows that the model does not start as the standard
    residual (small embeddings, a large eps), a UserWarning says so.

    Raises:
        UserError: an unknown name or setting (with the nearest valid one), or impossible settings.
    """
    if name == "standard":
        settings = switched_settings(name, settings)
        query_lr, layers = None, None
    takes_rate = "query_lr" in settings_of(name)
    check_settings(name, settings if takes_rate or query_lr in (None, 1.0) else {**settings, "query_lr": query_lr})
    if num_sublayers < 1 or width < 1:
        raise UserError(f"{num_sublayers} sublayers of width {width}: expected at least 1 of each")
    if value_residual not in VALUE_KINDS:
        raise unknown("value_residual", str(value_residual), VALUE_KINDS)
    mechanism: Any = residual_class(name)
    if layers is not None:
        settings = {"rules": [[mechanism.name, layers, settings]]}
        mechanism = cast(Any, Compose)
    residual: Residual = mechanism.__new__(mechanism, num_sublayers, width, **settings)
    if sublayers is not None:
        residual.sublayers = tuple(sublayers)
    if isinstance(residual, Compose):
        residual.make = functools.partial(_part, width=width, sublayers=residual.sublayers, query_lr=query_lr)
    mechanism.__init__(residual, num_sublayers, width, **settings)
    residual.value_kind = value_residual
    if isinstance(residual, Queried) and takes_rate and query_lr != 1.0:
        tenth = QUERY_LR if residual.slow else 1.0  # with a temperature a slower rate may not be needed
        residual.set_query_lr(tenth if query_lr is None else query_lr)
    residual.scale_is_default = "read_scale" not in settings
    if value_residual != "none":
        residual.traits = residual.traits._replace(starts_standard=False)
    default = torch.get_default_dtype()
    precise = compute_dtype(default)
    return residual if precise == default else residual.to(precise)


def _part(
    name: str, num_sublayers: int, settings: Mapping[str, Any], read_scale: str, *, query_lr: Any, **options: Any
) -> Residual:
    """Return a rule for some of a network's layers, without the options that this rule does not have."""
    known = settings_of(residual_class(name).name)
    shared = {"query_lr": query_lr} | ({"read_scale": read_scale} if read_scale != "mean" else {})
    shared = {key: value for key, value in shared.items() if key in known} | dict(settings)
    return make_residual(name, num_sublayers, **options, **shared)
