"""Gives the layers of any pre-norm Transformer a depth stream: hooks around them, and norms that read."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from attnres.errors import UserError
from attnres.models.readers import make_reading, make_taking
from attnres.models.stream import Stream
from attnres.residuals import Residual, make_residual, residual_class, settings_of

_CAPTURES = "transformers.utils.output_capturing"
"""Where Transformers' hooks are from that collect hidden states."""


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
        residual: a mechanism's name, or FILE.py:CLASS; `settings` are its settings.
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
    stack = [layer for layer in _part(module, layers) if isinstance(layer, nn.Module)]
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


def attach_stream(
    base: nn.Module,
    residual: Residual,
    layers: Sequence[nn.Module],
    reads: Sequence[str],
    final_norm: str | None,
    *,
    normed: bool = True,
    banked: bool = False,
) -> None:
    """Let `layers`, which are inside of `base`, read and write a stream of `residual`, which `base` has from now on.

    Args:
        reads: paths in a layer of what is called on the stream, in order. normed: whether these are norms.
        final_norm: path in `base` of the norm that reads the stream after the last layer; None: the last layer puts out
            the read itself.
        banked: nothing but the layers themselves asks for the stream between them, so that a pass without gradients may
            keep its sources in one place.
    """
    if residual.whole_layers and len(reads) != 2:
        raise UserError(
            f"residual '{residual.name}' takes every two sublayers for a layer, and layers have {len(reads)} "
            "here: choose one that counts sublayers, as block and full do"
        )
    if len(set(layers)) < len(layers):
        raise UserError(
            f"one {type(layers[0]).__name__} is several of the layers here, and a depth stream counts each once: give "
            "every layer a module of its own"
        )
    norms = {layer.get_submodule(path) for layer in layers for path in reads}
    if final_norm is not None and base.get_submodule(final_norm) in norms:
        raise UserError(
            f"the final norm '{final_norm}' is also a norm of a layer, and the two read the stream in different ways: "
            "give the end a module of its own"
        )
    base.residual = residual
    if torch.get_default_device().type != "meta":  # whose values are yet to come
        for part in cast(Any, residual).modules():
            part._is_hf_initialized = True  # or `post_init` and `init_weights` would start it anew when it is trained
    let_read = make_reading if normed else make_taking
    for layer in layers:
        for path in reads:
            let_read(layer.get_submodule(path))
    first, *others = layers
    first.register_forward_pre_hook(functools.partial(_start_stream, base, layers, banked), with_kwargs=True)
    for layer in others:
        layer.register_forward_pre_hook(_check_stream, with_kwargs=True)
    for number, layer in enumerate(layers, 1):
        layer.register_forward_hook(functools.partial(_leave, number * len(reads)))
    if final_norm is None:
        layers[-1].register_forward_hook(_end_stream)
    else:
        make_reading(base.get_submodule(final_norm), last=True)


def _start_stream(
    base: nn.Module,
    layers: Sequence[nn.Module],
    banked: bool,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wrap the first layer's input; the residual is that which `base` has when it runs."""
    residual = cast(nn.Module, base._modules["residual"])
    # a compiled pass takes no bank, and its hooks are not for Dynamo to look at
    no_bank = not banked or torch.is_grad_enabled() or torch.compiler.is_compiling()
    hooked = no_bank or any(map(_hooks_of_others, layers))
    if args:
        return (Stream.start(residual, args[0], hooked=hooked), *args[1:]), kwargs
    if "hidden_states" not in kwargs:
        raise UserError(
            f"{type(layer).__name__} was called with {', '.join(kwargs) or 'nothing'} by name: the stream is expected "
            "as its first argument, or as hidden_states"
        )
    return args, {**kwargs, "hidden_states": Stream.start(residual, kwargs["hidden_states"], hooked=hooked)}


def _hooks_of_others(layer: nn.Module) -> bool:
    """Whether a layer has hooks besides ours, one before it and one after. Those of Transformers do not count: the
    first pass that is asked for hidden states leaves them on the layers for good, and they do nothing in others."""
    after = 0
    for hook in layer._forward_hooks.values():
        after += getattr(hook, "__module__", None) != _CAPTURES
    return after > 1 or len(layer._forward_pre_hooks) > 1


def _check_stream(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a tensor between layers: what comes after it would be a plain residual without a word."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Stream):
            return
    raise _lost_stream(layer)


def _leave(count: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Refuse a tensor that a layer made of the stream, and a stream that not all of the `count` sublayers up to here
    have read; from now on what is added is a hook's."""
    stream = output[0] if isinstance(output, tuple) else output
    if not isinstance(stream, Stream):
        raise _lost_stream(layer)
    if stream.index != count:
        raise TypeError(
            f"{stream.index} sublayers and not {count} have read the stream when {type(layer).__name__} is done: is "
            "each of its pre-norms named, and given the stream itself?"
        )
    stream.inside = False


def _lost_stream(layer: nn.Module) -> UserError:
    return UserError(
        f"a tensor came to or from {type(layer).__name__} where the depth stream goes on: a hook that changes what a "
        "layer puts out adds to it (`return output + change`), since a stream is more than one vector, and "
        "attnres.inspect.intervene edits reads; a layer has to be pre-norm, x + f(norm(x))"
    )


def _end_stream(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Read the last layer's output, for a module without a final norm."""
    if isinstance(output, tuple):
        return (output[0].read(None), *output[1:])
    return output.read(None)
