"""Hooks that give the layers of a module a depth stream, and refuse a pass that loses it."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.residuals import Residual
from attnres.streams.banked import start_stream
from attnres.streams.neighbours import tell_neighbours
from attnres.streams.passes import FINISHED, STARTED, WAITING, note_progress, progress
from attnres.streams.readers import (
    REMEDY,
    Handed,
    Parts,
    make_reading,
    make_taking,
    make_whole,
    passed_over,
    place_of,
    replaced,
    with_first,
)
from attnres.streams.stream import OTHER_LAYERS, Stream

_CAPTURES = "transformers.utils.output_capturing"
"""Module of Transformers' hooks that collect hidden states."""


tell_neighbours()


def attach_stream(
    base: nn.Module,
    residual: Residual,
    layers: Sequence[nn.Module],
    reads: Sequence[str],
    final_norm: str | None,
    *,
    normed: bool = True,
    banked: bool = False,
) -> Parts:
    """Let `layers`, which are inside `base`, read and write a stream of `residual`, which becomes a part of `base`.

    Args:
        reads: paths in a layer of the modules called on the stream, in order; empty if a layer reads once, as a whole.
            normed: whether these modules are norms.
        final_norm: path in `base` of the norm that reads the stream after the last layer; None: the last layer outputs
            the read itself.
        banked: only the layers use the stream between them, so that a pass without gradients may use a bank.
    """
    if residual.whole_layers and len(reads) != 2:
        raise UserError(
            f"residual '{residual.name}' takes every two sublayers for a layer, and layers have {len(reads) or 1} "
            "here: choose one that counts sublayers, as block and full do"
        )
    if len(set(layers)) < len(layers):
        raise UserError(
            f"several layers are the same {type(layers[0]).__name__}, and a depth stream counts each module once: "
            "give every layer its own module"
        )
    norms = {layer.get_submodule(path) for layer in layers for path in reads}
    if final_norm is not None and base.get_submodule(final_norm) in norms:
        raise UserError(
            f"the final norm '{final_norm}' is also a norm of a layer, and the two read the stream in different "
            "ways: give the final norm a separate module"
        )
    base.residual = residual
    if torch.get_default_device().type != "meta":  # its values will be set later
        for part in cast(Any, residual).modules():
            part._is_hf_initialized = True  # or `post_init` and `init_weights` would initialise it again after training
    let_read = make_reading if normed else make_taking
    for layer in layers:
        if not reads:
            make_whole(layer)
        for path in reads:
            let_read(layer.get_submodule(path))
    parts = Parts(base, layers, reads, final_norm)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(functools.partial(_enter, parts, number, banked), with_kwargs=True)
        layer.register_forward_hook(functools.partial(_leave, parts, number))
    if final_norm is None:
        layers[-1].register_forward_hook(functools.partial(_end_stream, parts))
    else:
        norm = base.get_submodule(final_norm)
        make_reading(norm, last=True)
        norm.register_forward_pre_hook(functools.partial(_reopen, parts))
        base.register_forward_pre_hook(functools.partial(_begin, parts))
        base.register_forward_hook(functools.partial(_check_end, parts))
    return parts


def kinds_of(reads: int) -> tuple[str, ...]:
    """Return the kinds of a layer's sublayers, given their number."""
    kinds = {2: ("attention", "mlp"), 3: ("attention", "cross_attention", "mlp")}
    return kinds.get(reads, ("layer",) * max(reads, 1))


def _begin(parts: Parts, base: nn.Module, args: tuple[Any, ...]) -> None:
    if parts.enabled:
        note_progress(WAITING)


def _check_end(parts: Parts, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Refuse a pass in which the final norm did not read the stream: the head would get the running sum."""
    if not parts.enabled or torch.compiler.is_compiling() or progress() == FINISHED:
        return
    parts.refuse_changes()
    if progress() == WAITING and base.training:  # all layers were skipped (layerdrop)
        return
    raise UserError(
        f"the pass of {type(base).__name__} ended, and '{parts.final_norm}' has not read its depth stream: its forward "
        f"or the layers were replaced; {REMEDY}"
    )


def _enter(
    parts: Parts, number: int, banked: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a stream with the first layer's input, with the residual that `base` has in this pass.

    Refuse a tensor as a later layer's input, because from there on the residual would silently be the standard one.
    Layers skipped in training (layerdrop) write nothing.
    """
    if not parts.enabled:
        return None
    place, stream = place_of((Stream, Handed), args, kwargs)
    count = number * parts.each
    if stream is not None:
        layer_input, stream = stream, stream.stream(parts.residual) if isinstance(stream, Handed) else stream
        # a stream begun by another module, such as a pipeline stage, skips nothing
        if stream.index < count and layer.training and (torch.compiler.is_compiling() or progress() != WAITING):
            stream = passed_over(stream, count)
        if parts.unpacks(layer):
            stream = Handed.of(stream)
        return None if stream is layer_input else replaced(args, kwargs, place, stream)
    if number > 0 and not (layer.training and _none_ran()):
        parts.refuse_changes()
        raise _lost_stream(layer)
    place = 0 if args else "hidden_states"
    if not args and "hidden_states" not in kwargs:
        raise UserError(
            f"{type(layer).__name__} was called with {', '.join(kwargs) or 'nothing'} by name: the stream is expected "
            "as its first argument, or as hidden_states"
        )
    parts.refuse_changes()
    # a compiled pass uses no bank, and Dynamo should not trace its hooks
    no_bank = not banked or torch.is_grad_enabled() or torch.compiler.is_compiling()
    hooked = no_bank or any(map(_hooks_of_others, parts.layers))
    embedding = cast(Tensor, args[0] if args else kwargs["hidden_states"])
    stream = passed_over(start_stream(parts.residual, embedding, hooked=hooked), count)
    note_progress(STARTED)
    return replaced(args, kwargs, place, Handed.of(stream) if parts.unpacks(layer) else stream)


def _none_ran() -> bool:
    """Return whether no layer of the running pass has begun its stream, because the first ones were skipped. A layer
    that runs again in backward gets its first input."""
    return not torch.compiler.is_compiling() and (progress() == WAITING or torch._C._current_graph_task_id() != -1)


def _hooks_of_others(layer: nn.Module) -> bool:
    """Return whether a layer has hooks other than this package's two. Those of Transformers do not count: the first
    pass that asks for hidden states leaves them on the layers for good, and they do nothing in other passes."""
    after = 0
    for hook in layer._forward_hooks.values():
        after += getattr(hook, "__module__", None) != _CAPTURES
    return after > 1 or len(layer._forward_pre_hooks) > 1


def _leave(parts: Parts, number: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Refuse a tensor as the result of a layer, and a stream that not all sublayers so far have read; additions from
    now on come from hooks."""
    if not parts.enabled:
        return None
    stream, count = output[0] if type(output) is tuple else output, (number + 1) * parts.each
    if not isinstance(stream, (Stream, Handed)):
        raise _lost_stream(layer)
    if stream.index != count:
        raise UserError(
            f"{stream.index} sublayers and not {count} have read the stream when {type(layer).__name__} is done: is "
            f"each of its pre-norms named, and given the stream itself? {OTHER_LAYERS}"
        )
    if isinstance(stream, Handed):
        return None
    stream.inside = False
    is_last = number + 1 == len(parts.layers) and parts.final_norm is None
    return with_first(output, Handed.of) if parts.hands_tuples(number) and not is_last else None


def _reopen(parts: Parts, norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Give the final norm the stream that the last layer passed on as a tuple."""
    if args and isinstance(args[0], Handed):
        return (args[0].stream(parts.residual), *args[1:])
    return None


def _lost_stream(layer: nn.Module) -> UserError:
    return UserError(
        f"a tensor came to or from {type(layer).__name__} where the depth stream goes on: a layer has to be pre-norm, "
        f"x + f(norm(x)) ({OTHER_LAYERS}), and a hook that changes what a layer puts out adds to it "
        "(`return output + change`), since a stream is more than one vector; attnres.inspect.intervene edits reads"
    )


def _end_stream(parts: Parts, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Read the last layer's output, for a module without a final norm."""
    if not parts.enabled:
        return None
    return with_first(
        output, lambda stream: (stream.stream(parts.residual) if isinstance(stream, Handed) else stream).read(None)
    )
