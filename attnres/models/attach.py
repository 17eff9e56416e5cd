"""Gives the layers of any pre-norm Transformer a depth stream: hooks around them, and norms that read."""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.models.readers import make_reading, make_taking, still_reads
from attnres.models.stream import FINISHED, STARTED, WAITING, Stream, note_progress, passed_over, progress
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
    parts = _Parts(base, layers, reads, final_norm)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(functools.partial(_enter, parts, banked, number), with_kwargs=True)
        layer.register_forward_hook(functools.partial(_leave, (number + 1) * len(reads)))
    if final_norm is None:
        layers[-1].register_forward_hook(_end_stream)
    else:
        make_reading(base.get_submodule(final_norm), last=True)
        base.register_forward_pre_hook(_begin)
        base.register_forward_hook(functools.partial(_check_end, parts))


class _Parts:
    """Where the layers of `base`, what reads in them, and the final norm lie, and whether they still do.

    What wraps one of them (adapters, checkpointing, sharding, compilers) is no change.

    Args:
        layers: in order. reads: paths in each of what is called on the stream. final_norm: path in `base`.
    """

    def __init__(
        self, base: nn.Module, layers: Sequence[nn.Module], reads: Sequence[str], final_norm: str | None
    ) -> None:
        names = {id(module): name for name, module in base.named_modules()}
        self.base, self.layers, self.reads, self.final_norm = base, list(layers), tuple(reads), final_norm
        self.paths = [names[id(layer)] for layer in layers]
        holders = {path.rpartition(".")[0]: None for path in self.paths}
        self.counts = {path: len(base.get_submodule(path)._modules) for path in holders}
        self._note()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Parts":
        """A copy with the copy of `base`; of a layer that is copied alone the streams stay those of `base`."""
        if id(self.base) not in memo:
            return self
        memo[id(self)] = new = object.__new__(_Parts)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def _note(self) -> None:
        """Take note of what lies on the ways to the final norm, the layers and their reads now."""
        self.end = [] if self.final_norm is None else list(_links(self.base, self.final_norm))[-1:]
        ways = [link for path in self.paths for link in _links(self.base, path)]
        ways += [link for layer in self.layers for path in self.reads for link in _links(layer, path)]
        self.links = list({(id(module), name): (module, name, part) for module, name, part in ways}.values())
        self.links += self.end
        self.sizes = [(self.base.get_submodule(path), count) for path, count in self.counts.items()]

    def refuse_changes(self) -> None:
        """Raise a UserError that names a layer or a norm that was replaced, added or taken out."""
        compiling = torch.compiler.is_compiling()
        # each link would be a compiler's guard: there only what nothing else notices
        same = all(module._modules.get(name) is part for module, name, part in (self.end if compiling else self.links))
        if same and (compiling or all(len(holder._modules) == count for holder, count in self.sizes)):
            return
        base, layers = type(self.base).__name__, []
        for path, count in self.counts.items():
            holder = _reach(self.base, path)
            if isinstance(holder, nn.ModuleList) and len(holder) != count:
                raise UserError(f"'{path}' of {base} has {len(holder)} layers, which had {count}: {_REMEDY}")
        for number, path in enumerate(self.paths):
            found = _reach(self.base, path)
            layer = None if found is None else next((m for m in found.modules() if self._is_layer(m, number)), None)
            if layer is None:
                raise self._changed(path, found)
            layers.append(layer)
            for read in self.reads:
                norm = _reach(layer, read)
                if norm is None or not still_reads(norm):
                    raise self._changed(f"{path}.{read}", norm)
        if self.final_norm is not None:
            norm = _reach(self.base, self.final_norm)
            if norm is None or not still_reads(norm, last=True):
                raise self._changed(self.final_norm, norm)
        if not compiling:
            self.layers = layers
            self._note()

    def _is_layer(self, module: nn.Module, number: int) -> bool:
        """Whether a module has the hook of this layer."""
        hooks: list[Any] = [
            hook for hook in module._forward_pre_hooks.values() if getattr(hook, "func", None) is _enter
        ]
        return any(hook.args[0] is self and hook.args[2] == number for hook in hooks)

    def _changed(self, path: str, found: nn.Module | None) -> UserError:
        base = type(self.base).__name__
        if found is None:
            return UserError(f"'{path}' of {base} is gone, which reads the depth stream: {_REMEDY}")
        return UserError(
            f"'{path}' of {base} is a {type(found).__name__} that was put in place of what reads the depth stream: "
            f"{_REMEDY}"
        )


_REMEDY = "keep the layers and norms that the depth reads were given to, or change the plain model and convert that"


def _links(module: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Give (module, name, its part of that name) on the way along a path, as far as no wrapper hides a part."""
    for name in path.split("."):
        part = module._modules.get(name)
        if part is None:
            return
        yield module, name, part
        module = part


def _reach(module: nn.Module, path: str) -> nn.Module | None:
    """The part of that path; None where it is missing."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _begin(base: nn.Module, args: tuple[Any, ...]) -> None:
    note_progress(WAITING)


def _check_end(parts: _Parts, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Refuse a pass in which the final norm did not read the stream: the head would get the running sum."""
    if torch.compiler.is_compiling() or progress() == FINISHED:
        return
    parts.refuse_changes()
    if progress() == WAITING and base.training:  # every layer was skipped (layerdrop)
        return
    raise UserError(
        f"the pass of {type(base).__name__} ended, and '{parts.final_norm}' has not read its depth stream: its forward "
        f"or the layers were replaced; {_REMEDY}"
    )


def _enter(
    parts: _Parts, banked: bool, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a stream with the first layer's input, with the residual that the base has when it runs.

    Of later layers refuse a tensor: what comes after it would be a plain residual without a word. Layers that a pass
    in training skips (layerdrop) write nothing.
    """
    for place, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Stream):
            count = number * len(parts.reads)
            # a stream that another module has begun, as a pipeline's stage does, skips nothing
            skips = layer.training and (torch.compiler.is_compiling() or progress() != WAITING)
            if not skips or value.index >= count:
                return None
            return _replaced(args, kwargs, place, passed_over(value, count))
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
    # a compiled pass takes no bank, and its hooks are not for Dynamo to look at
    no_bank = not banked or torch.is_grad_enabled() or torch.compiler.is_compiling()
    hooked = no_bank or any(map(_hooks_of_others, parts.layers))
    embedding = cast(Tensor, args[0] if args else kwargs["hidden_states"])
    stream = Stream.start(cast(nn.Module, parts.base._modules["residual"]), embedding, hooked=hooked)
    note_progress(STARTED)
    return _replaced(args, kwargs, place, passed_over(stream, number * len(parts.reads)))


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, value: Any) -> tuple[Any, Any]:
    """The arguments with another value at one place, a number or a name."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def _none_ran() -> bool:
    """Whether no layer of the running pass has begun its stream: the first ones were skipped. A layer that is run again
    in backward is given what it was given before."""
    return not torch.compiler.is_compiling() and (progress() == WAITING or torch._C._current_graph_task_id() != -1)


def _hooks_of_others(layer: nn.Module) -> bool:
    """Whether a layer has hooks besides ours, one before it and one after. Those of Transformers do not count: the
    first pass that is asked for hidden states leaves them on the layers for good, and they do nothing in others."""
    after = 0
    for hook in layer._forward_hooks.values():
        after += getattr(hook, "__module__", None) != _CAPTURES
    return after > 1 or len(layer._forward_pre_hooks) > 1


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
        "attnres.inspect.edits edits reads; a layer has to be pre-norm, x + f(norm(x))"
    )


def _end_stream(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Read the last layer's output, for a module without a final norm."""
    if isinstance(output, tuple):
        return (output[0].read(None), *output[1:])
    return output.read(None)
