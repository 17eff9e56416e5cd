"""Gives the layers of any pre-norm Transformer a depth stream: hooks around them, and norms that read."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from attnres.errors import UserError
from attnres.residuals import Residual, make_residual, residual_class, settings_of
from attnres.streams.layers import attach_stream


def attach(
    module: nn.Module,
    residual: str = "block",
    *,
    layers: str = "layers",
    norms: Sequence[str] = ("norm1", "norm2"),
    final_norm: str | None = "norm",
    sublayers: Sequence[str] | None = None,
    width: int | None = None,
    read_scale: Literal["sum", "mean"] = "sum",
    **settings: Any,
) -> Residual:
    """Let the layers of a module of your own, or of another library, read and write a depth stream; in place.

    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)
    >>> attach(encoder, "full").query.shape
    torch.Size([9, 16])

    A layer's own code stays: it must norm its input once for each sublayer and add what the sublayer puts out to it,
    `x = x + f(norm(x))`, with whatever scales `f` or the normed vector. With a mechanism that starts as the standard
    residual the module then computes what it computed before, exactly so where `read_scale` is "sum".

    Args:
        module: it has the parameters as `module.residual` from now on.
        residual: a mechanism's name, or FILE.py:CLASS; `settings` are its settings. `query_lr` is 0.1 unless given:
            queries and gains move at a tenth of the rate that your optimizer has.
        layers: path in `module` of the list of layers.
        norms: paths in a layer of the norms that read the stream, in the order of the calls.
        final_norm: path in `module` of the norm after the last layer; None where the layers' output is used as it is.
        sublayers: kinds of the sublayers, one for each norm, attention and MLP unless given: for figures, and for
            mechanisms that treat an "mlp" otherwise.
        width: of the stream; None asks the first norm.

    Returns:
        The residual.

    Raises:
        UserError: paths that lead nowhere, a module that has a residual already or calls something else so, unknown
            names, impossible settings, a mechanism that asks for other start values of the layers.
    """
    taken = getattr(module, "residual", None)
    if isinstance(taken, Residual):
        raise UserError(f"{type(module).__name__} has a residual already: attach it once")
    if hasattr(module, "residual"):
        raise UserError(
            f"{type(module).__name__} calls a {type(taken).__name__} of its own 'residual', which is the name that the "
            "depth stream takes: rename it first"
        )
    stack = [layer for layer in _part(module, layers)._modules.values() if isinstance(layer, nn.Module)]
    if not stack or not norms:
        raise UserError(f"'{layers}' of {type(module).__name__} holds no layers, or no norms are named")
    first, *_ = [_part(layer, path) for layer in stack for path in norms]
    if final_norm is not None:
        _part(module, final_norm)
    kinds = tuple(sublayers or ("attention", "mlp"))
    if len(kinds) != len(norms):
        raise UserError(f"{len(norms)} norms and {len(kinds)} sublayers were given: one kind for each norm is expected")
    width = width or _width(first)
    name = residual_class(residual).name
    scale = {"read_scale": read_scale} if "read_scale" in settings_of(name) else {}
    settings.setdefault("query_lr", None)
    parameter = next(stack[0].parameters())
    with torch.device(parameter.device):
        depth = len(stack) * len(norms)
        connection = make_residual(name, depth, width, sublayers=kinds, **scale, **settings).float()
    if connection.value_kind != "none":
        raise UserError(
            f"value_residual is '{connection.value_kind}', and where a module's attention makes its values is not "
            "known here: leave it out"
        )
    if connection.branch_scale() != 1.0:
        raise UserError(
            f"residual '{name}' scales the start values of a layer's branches, and which weights those are is not "
            "known here: choose another residual"
        )
    connection.train(module.training)
    attach_stream(module, connection, stack, norms, final_norm)
    return connection


def _part(module: nn.Module, path: str) -> Any:
    try:
        part: Any = module.get_submodule(path)
    except AttributeError:
        part = None
    if part is None:
        raise UserError(f"{type(module).__name__} has no '{path}': print the module to see the names of its parts")
    return part


def _width(norm: nn.Module) -> int:
    shape = getattr(norm, "normalized_shape", None) or getattr(getattr(norm, "weight", None), "shape", None)
    if not shape:
        raise UserError(f"a {type(norm).__name__} does not say how wide the stream is: give width")
    return shape[-1]
