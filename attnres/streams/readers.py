"""Modules that read a stream (norms before sublayers and the head, sublayers without a norm), and their places in a
model."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.residuals.base import verbs
from attnres.streams.inputs import Inputs
from attnres.streams.known_norms import Exchanged, exchange, is_rms_norm, own_class
from attnres.streams.passes import FINISHED, note_progress
from attnres.streams.stream import Stream


class _Reading(Exchanged):
    """Mixin for a norm: reads when called with a stream, norms when called with a tensor."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(hidden_states, Stream):
            if isinstance(hidden_states, torch.fx.Proxy):
                raise TypeError(
                    f"a {own_class(self).__name__} that reads a depth stream is more than its arithmetic: it cannot be "
                    "traced by itself, nor replaced by another norm"
                )
            return super().forward(hidden_states, *args, **kwargs)
        if args or kwargs:
            raise UserError(
                f"a {own_class(self).__name__} was named as a norm and takes more than the hidden state: name the norm "
                "inside of it"
            )
        return self.of_stream(hidden_states)

    def of_stream(self, stream: Stream) -> Tensor | Inputs:
        return stream.read(self)


class _Finishing(_Reading):
    """As `_Reading`, for the norm before the head."""

    def of_stream(self, stream: Stream) -> Tensor | Inputs:
        if self.training:  # the last layers may be skipped (layerdrop)
            stream = passed_over(stream, stream.residual("itself").num_sublayers)
        x = stream.finish(self)
        note_progress(FINISHED)
        return x


def make_reading(norm: nn.Module, *, last: bool = False) -> None:
    """Let this norm read streams. Its parameters, name and behaviour on tensors do not change.

    Args:
        last: whether it is the norm before the head.
    """
    if hasattr(norm, "variance_epsilon"):
        norm.__dict__["is_rms_norm"] = is_rms_norm(norm)
    exchange(norm, _Finishing if last else _Reading)


def _read_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    if args and isinstance(args[0], Stream):
        return (args[0].read(None), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Stream):
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].read(None)}
    return None


def make_taking(mixer: nn.Module) -> None:
    """Let an attention or MLP that takes the stream without a norm read the stream. This uses a hook, because
    Transformers looks at an attention's class."""
    mixer.register_forward_pre_hook(_read_input, with_kwargs=True)


class _Whole(Exchanged):
    """Mixin for a layer: reads a stream once, and writes the layer's change of it."""

    renames = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place, stream = place_of(Stream, args, kwargs)
        if stream is None:
            return super().forward(*args, **kwargs)
        h = stream.read(None)
        version = None if torch.compiler.is_compiling() else h._version
        args, kwargs = replaced(args, kwargs, place, h)
        output = super().forward(*args, **kwargs)
        if version is not None and h._version != version:
            raise UserError(
                f"a {own_class(self).__name__} changes its input in place, so that what it adds is lost: let it add "
                "out of place (x = x + y)"
            )
        return with_first(output, lambda first: stream + (first - h))


def make_whole(layer: nn.Module) -> None:
    """Let a layer read a stream once, whatever is inside it."""
    exchange(layer, _Whole)


class _Unpacking(Exchanged):
    """Mixin for a layer that checkpoints its own forward: takes a stream also as a tuple of tensors, and then returns a
    tuple."""

    renames = False
    parts: "Parts"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place, handed = place_of(Handed, args, kwargs)
        if handed is None:
            return super().forward(*args, **kwargs)
        args, kwargs = replaced(args, kwargs, place, handed.stream(self.parts.residual))
        return with_first(super().forward(*args, **kwargs), Handed.of)


def let_checkpoint(parts: "Parts") -> None:
    """Let layers that checkpoint their own forward, as those of Transformers do, be compiled in one graph."""
    for layer in parts.layers:
        exchange(layer, _Unpacking)
        layer.parts = cast(Any, parts)


def place_of(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Return the place (a number or a name) and value of the first argument of a kind; None without one."""
    for place, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, kind):
            return place, value
    return 0, None


def with_first(output: Any, change: Callable[[Any], Any]) -> Any:
    """Return a layer's output with its hidden state changed, which is the output or its first element."""
    return (change(output[0]), *output[1:]) if type(output) is tuple else change(output)


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, value: Any) -> tuple[Any, Any]:
    """Return the arguments with another value at one place, a number or a name."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def make_plain(part: nn.Module) -> None:
    """Undo the changes that made a module read streams, and remove the hooks of `Parts`."""
    for hooks, with_kwargs in (
        (part._forward_pre_hooks, part._forward_pre_hooks_with_kwargs),
        (part._forward_hooks, part._forward_hooks_with_kwargs),
    ):
        for number, hook in list(hooks.items()):
            if hook is _read_input or owner(hook) is not None:
                del hooks[number]
                with_kwargs.pop(number, None)
    if isinstance(part, _Reading | _Whole | _Unpacking):
        for name in ("is_rms_norm", "parts"):
            part.__dict__.pop(name, None)
        part.__class__ = own_class(part)


def still_reads(part: nn.Module, *, last: bool = False) -> bool:
    """Return whether this module, or one inside a wrapper, reads streams; `last`: as the norm before the head."""
    kind = _Finishing if last else _Reading
    return any(isinstance(m, kind) or _read_input in m._forward_pre_hooks.values() for m in part.modules())


class Parts:
    """The layers of `base`, the modules that read in them, and the final norm; and whether they are unchanged.

    A wrapper of one of them (adapters, checkpointing, sharding, compilers) is no change.

    Args:
        layers: the layers in order. reads: paths in each of the modules called on the stream; empty if layers read
            once, as a whole.
        final_norm: path in `base`.

    Attributes:
        each: number of sublayers in a layer.
        enabled: whether passes have a stream; otherwise they are the plain module's.
        attached: whether `attnres.attach` made it, so that `detach` can undo it.
        tuples: whether layers pass on tuples of tensors in every pass.
        shown: whether the running pass has to return its hidden states.
    """

    def __init__(
        self, base: nn.Module, layers: Sequence[nn.Module], reads: Sequence[str], final_norm: str | None
    ) -> None:
        names = {id(module): name for name, module in base.named_modules()}
        self.base, self.layers, self.reads, self.final_norm = base, list(layers), tuple(reads), final_norm
        self.each, self.enabled, self.attached = len(reads) or 1, True, False
        self.tuples = self.shown = False
        self.paths = [names[id(layer)] for layer in layers]
        holders = {path.rpartition(".")[0]: None for path in self.paths}
        self.counts = {path: len(base.get_submodule(path)._modules) for path in holders}
        self._note()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parts":
        """Return a copy that refers to the copy of `base`; a layer that is copied alone keeps the streams of the old
        `base`."""
        if id(self.base) not in memo:
            return self
        memo[id(self)] = new = object.__new__(Parts)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def _note(self) -> None:
        """Record the modules on the paths to the final norm, the layers and their reads."""
        self.end = [] if self.final_norm is None else list(_links(self.base, self.final_norm))[-1:]
        ways = [link for path in self.paths for link in _links(self.base, path)]
        ways += [link for layer in self.layers for path in self.reads for link in _links(layer, path)]
        self.links = list({(id(module), name): (module, name, part) for module, name, part in ways}.values())
        self.links += self.end
        self.homes = [
            (self.base.get_submodule(above), name) for above, _, name in (p.rpartition(".") for p in self.paths)
        ]
        self.sizes = [(self.base.get_submodule(path), count) for path, count in self.counts.items()]

    def hands_tuples(self, number: int) -> bool:
        """Return whether a layer passes on a tuple of tensors: in a compiled pass a checkpointed layer takes only
        these."""
        if self.tuples or not torch.compiler.is_compiling():
            return self.tuples
        layer, (holder, name) = self.layers[number], self.homes[number]
        return holder._modules[name] is not layer or self.unpacks(layer)

    def unpacks(self, layer: nn.Module) -> bool:
        """Return whether a layer has to be given a tuple, because it checkpoints its own forward in a compiled pass."""
        return isinstance(layer, _Unpacking) and layer.training and torch.compiler.is_compiling() and not self.shown

    @property
    def residual(self) -> nn.Module:
        """Return the residual that `base` has in this pass, or its wrapper."""
        return cast(nn.Module, self.base._modules["residual"])

    def refuse_changes(self) -> None:
        """Raise a UserError that names a layer or a norm that was replaced, added or removed."""
        compiling = torch.compiler.is_compiling()
        # under a compiler each link would be a guard, so only those are checked that nothing else would notice
        same = all(module._modules.get(name) is part for module, name, part in (self.end if compiling else self.links))
        if same and (compiling or all(len(holder._modules) == count for holder, count in self.sizes)):
            return
        base, layers = type(self.base).__name__, []
        for path, count in self.counts.items():
            holder = _reach(self.base, path)
            if isinstance(holder, nn.ModuleList) and len(holder) != count:
                raise UserError(f"'{path}' of {base} has {len(holder)} layers, which had {count}: {REMEDY}")
        for number, path in enumerate(self.paths):
            present = _reach(self.base, path)
            layer = None if present is None else next((m for m in present.modules() if self._is_layer(m, number)), None)
            if layer is None:
                raise self._changed(path, present)
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
        """Return whether a module has the hook of this layer."""
        hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if owner(hook) is self]
        return any(hook.args[1:2] == (number,) for hook in hooks)

    def _changed(self, path: str, present: nn.Module | None) -> UserError:
        base = type(self.base).__name__
        if present is None:
            return UserError(f"'{path}' of {base} is missing, which reads the depth stream: {REMEDY}")
        return UserError(
            f"'{path}' of {base} is a {type(present).__name__} that was put in place of what reads the depth stream: "
            f"{REMEDY}"
        )


REMEDY = "keep the layers and norms that the depth reads were given to, or change the plain model and convert that"


def owner(hook: Any) -> Parts | None:
    """Return the `Parts` that a hook belongs to; None for other hooks."""
    first, *_ = (*getattr(hook, "args", ()), None)
    return first if isinstance(first, Parts) else None


def parts_in(module: nn.Module) -> list[Parts]:
    """Return the `Parts` of each stack in a module that reads a stream."""
    hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
    return list(dict.fromkeys(parts for hook in hooks if (parts := owner(hook)) is not None))


def _links(module: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (module, name, submodule) along a path, as far as no wrapper hides a submodule."""
    for name in path.split("."):
        part = module._modules.get(name)
        if part is None:
            return
        yield module, name, part
        module = part


def _reach(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at a path; None if it is missing."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


# ------------------------------------------------------------------ a stream between two layers


def passed_over(stream: Stream, count: int) -> Stream:
    """Return the stream before sublayer `count` when the sublayers up to there are skipped: they write zeros.

    Raises:
        UserError: later layers need the values of the first, which is skipped.
    """
    if stream.index >= count:
        return stream
    if stream.index == 0 and stream.residual("itself").value_mix is not None:
        raise UserError(
            "the first layer was skipped (layerdrop), from whose values later layers take some (value_residual): "
            "set the config's layerdrop to 0"
        )
    while stream.index < count:
        stream.read(None)
        stream = stream + torch.zeros_like(stream.like)
    stream.inside = False
    return stream


class Handed(NamedTuple):
    """A stream between two layers as a tuple of tensors, for a checkpointed layer in a compiled pass.

    Attributes:
        state: the state with every output written. like, values: as in `Stream`.
    """

    state: Any
    index: int
    like: Tensor
    values: Tensor | None

    @classmethod
    def of(cls, stream: Stream) -> "Handed":
        return cls(stream.written(), stream.index, stream.like, stream.values)

    def stream(self, residual: nn.Module) -> Stream:
        """Return the stream that continues from here."""
        tracked, call = torch.is_grad_enabled(), verbs(residual)
        return Stream(residual, self.state, self.index, self.like, None, self.values, call, tracked)
