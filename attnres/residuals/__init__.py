"""Residual mechanisms: `standard`, its placebo control, Attention Residuals, and alternatives, with one interface."""

from attnres.residuals.base import Residual
from attnres.residuals.layout import (
    About,
    Learned,
    Read,
    Source,
    Traits,
    columns,
    depths,
    labels,
    layout_of,
    outputs,
    sublayer_name,
)
from attnres.residuals.mechanisms.compose import compose
from attnres.residuals.mechanisms.standard import OneStream
from attnres.residuals.registry import (
    RESIDUALS,
    changed_settings,
    check_settings,
    make_residual,
    register,
    residual_class,
    settings_in_full,
    settings_of,
    source_file,
    source_sha256,
    switched_settings,
    traits_of,
)
from attnres.residuals.state import Slot, Ways
from attnres.residuals.watch import Editor, NormLike, Observer, watched_by

__all__ = [
    "RESIDUALS",
    "About",
    "Editor",
    "Learned",
    "NormLike",
    "Observer",
    "OneStream",
    "Read",
    "Residual",
    "Slot",
    "Source",
    "Traits",
    "Ways",
    "changed_settings",
    "check_settings",
    "columns",
    "compose",
    "depths",
    "labels",
    "layout_of",
    "make_residual",
    "outputs",
    "register",
    "residual_class",
    "settings_in_full",
    "settings_of",
    "source_file",
    "source_sha256",
    "sublayer_name",
    "switched_settings",
    "traits_of",
    "watched_by",
]
