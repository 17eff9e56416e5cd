"""Residual mechanisms by name: `standard`, its control, Attention Residuals, and rivals, behind one interface."""

import inspect
from typing import Any

from attnres.errors import UserError, unknown
from attnres.residuals.base import Editor, NormLike, Observer, Residual, output_names, sublayer_name
from attnres.residuals.block import Block
from attnres.residuals.boundary import Boundary, BoundaryNormed
from attnres.residuals.cumulative import Cumulative
from attnres.residuals.deepnorm import DeepNorm
from attnres.residuals.denseformer import DenseFormer
from attnres.residuals.depth_attention import DepthAttention
from attnres.residuals.full import Full
from attnres.residuals.gates import Gates
from attnres.residuals.hyper_connections import HyperConnections
from attnres.residuals.rescaled import Rescaled
from attnres.residuals.standard import Standard

RESIDUALS: dict[str, type[Residual]] = {
    cls.name: cls
    for cls in (
        Standard,
        Rescaled,
        Full,
        Block,
        Cumulative,
        Boundary,
        BoundaryNormed,
        DeepNorm,
        HyperConnections,
        DenseFormer,
    )
}


def settings_of(name: str) -> dict[str, Any]:
    """The settings a residual takes, with their defaults."""
    if name not in RESIDUALS:
        raise unknown("residual", name, RESIDUALS)
    residual = RESIDUALS[name]
    makers = (residual, Gates) if issubclass(residual, DepthAttention) else (residual,)  # depth reads pass them on
    parameters = [p for maker in makers for p in inspect.signature(maker.__init__).parameters.values()]
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def make_residual(name: str, num_sublayers: int, width: int, **settings: Any) -> Residual:
    """The residual called `name` for L sublayers of width d.

    Raises:
        UserError: an unknown name or setting (with the nearest valid one), or settings that are impossible.
    """
    valid = settings_of(name)
    for key in settings:
        if key not in valid:
            if not valid:
                raise UserError(f"residual '{name}' takes no settings: '{key}' was given; remove it")
            raise unknown(f"setting of residual '{name}'", key, valid)
    if num_sublayers < 1 or width < 1:
        raise UserError(f"{num_sublayers} sublayers of width {width}: expected at least 1 of each")
    return RESIDUALS[name](num_sublayers, width, **settings)


__all__ = [
    "RESIDUALS",
    "Block",
    "Boundary",
    "BoundaryNormed",
    "Cumulative",
    "DeepNorm",
    "DenseFormer",
    "Editor",
    "Full",
    "HyperConnections",
    "NormLike",
    "Observer",
    "Rescaled",
    "Residual",
    "Standard",
    "make_residual",
    "output_names",
    "settings_of",
    "sublayer_name",
]
