"""Find where a module's layers read and write their hidden state, by observing one forward pass.

The first layer gets a stand-in for its hidden state, which records the modules called on it and the additions to it. A
stack can have depth reads if its layers read and write alternately, each read by a norm, and its final norm reads last;
other stacks are refused with the difference. Reads are looked for among the norms of a layer first; if that does not
fit, among all modules called on the hidden state.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from attnres.errors import first_line
from attnres.head import evaluating
from attnres.streams.stream import is_addition
from attnres.text import listed

PATTERN = "read, write, read, write"
_OUTSIDE = -1


class NoFitError(Exception):
    """Says, as the end of a sentence, why layers cannot have depth reads."""


class Found(NamedTuple):
    """The places where a stack of layers reads its hidden state.

    Attributes:
        reads: paths in a layer of the modules called on the hidden state, in order; normed: whether these are norms.
        final_norm: path of the norm that reads after the last layer; None without one.
        width: width of the hidden state.
    """

    reads: tuple[str, ...]
    normed: bool
    final_norm: str | None
    width: int


def find_reads(
    base: nn.Module,
    layers: Sequence[nn.Module],
    run: Callable[[], Any],
    *,
    strict: bool = True,
    counts: Container[int] = (2, 3),
) -> Found:
    """Find where `layers`, which are inside `base`, read.

    Args:
        run: runs one forward pass.
        strict: only norms, sublayers and additions may use the hidden state, and a final norm must read it. Otherwise
            other operations get its value.
        counts: allowed numbers of reads in a layer.

    Raises:
        NoFitError: the layers do not fit.
    """
    try:
        watched = _Watched(base, layers, run, norms_alone=True, strict=strict)
        reads = _reads(watched.events, len(layers), counts)
    except NoFitError:
        watched = _Watched(base, layers, run, norms_alone=False, strict=strict)
        reads = _reads(watched.events, len(layers), counts)
    outside = [place for kind, index, place in watched.events if index == _OUTSIDE and kind == "read"]
    final = [place for place in outside if watched.normed[_OUTSIDE, place]]
    if strict and (len(outside) != 1 or not final):
        raise NoFitError("has no final norm that reads the stream after the last layer")
    normed = all(watched.normed[index, place] for index in range(len(layers)) for place in reads)
    return Found(reads, normed, final[0] if len(outside) == len(final) == 1 else None, watched.width)


def find_layers(base: nn.Module) -> str:
    """Return the path of the list of layers: among lists of modules of one class, the one with the most weights.

    Raises:
        NoFitError: there is no such list.
    """
    sizes = {}
    for path, part in base.named_modules():
        children = list(part.children())
        if (
            isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            and len({type(one) for one in children}) == 1
        ):
            sizes[path] = sum(parameter.numel() for parameter in part.parameters())
    sizes.pop("", None)
    if not sizes:
        raise NoFitError("has no list of layers of one class")
    return max(sizes, key=lambda path: sizes[path])


class _HiddenState:
    """Stands in for a hidden state, and records what is done with it."""

    def __init__(self, value: Tensor, note: Callable[[str, str], None], strict: bool) -> None:
        self.value, self.note, self.strict = value, note, strict

    def __add__(self, output: Any) -> "_HiddenState":
        if isinstance(output, _HiddenState):
            raise NoFitError("adds its hidden state to itself")
        self.note("write", "")
        return _HiddenState(self.value + output, self.note, self.strict)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_addition(func) and not kwargs:
            left, right = args
            return left + right if isinstance(left, _HiddenState) else right + left

        name = f"torch's '{getattr(func, '__name__', func)}'"
        args, kwargs = _pytree.tree_map_only(_HiddenState, lambda state: state.plain(name), (args, kwargs or {}))
        return func(*args, **kwargs)

    def plain(self, to: str) -> Tensor:
        """Return the value for another operation."""
        if self.strict:
            raise NoFitError(f"gives its hidden state to {to}")
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.strict and name not in ("shape", "dtype", "device", "size"):
            raise NoFitError(f"uses '{name}' of its hidden state")
        return getattr(self.value, name)

    __iter__ = None  # Transformers tests whether an output is iterable

    def __getitem__(self, place: Any) -> Tensor:
        return self.plain("an index")[place]

    def __mul__(self, factor: Any) -> Tensor:
        return self.plain("a product") * factor

    __rmul__ = __mul__


class _Watched:
    """One forward pass, with the reads and writes in it.

    Attributes:
        events: (kind, layer, path) of each read and write.
        normed: for each read, whether a norm does it.
        width: width of the hidden state.
        norms_alone: only norms read; other modules called on the hidden state pass it on to their submodules.
    """

    def __init__(
        self,
        base: nn.Module,
        layers: Sequence[nn.Module],
        run: Callable[[], Any],
        *,
        norms_alone: bool,
        strict: bool,
    ) -> None:
        """Run the pass. Raises NoFitError."""
        self.norms_alone, self.strict = norms_alone, strict
        self.events: list[tuple[str, int, str]] = []
        self.normed: dict[tuple[int, str], bool] = {}
        self.width, self.count = 0, len(layers)
        self.now = _OUTSIDE  # the running layer
        inside = {id(module) for layer in layers for module in layer.modules()}
        readers = [
            (path, module)
            for path, module in base.named_modules()
            if id(module) not in inside and all(id(part) not in inside for part in module.modules())
        ]
        readers += [(path, module) for layer in layers for path, module in layer.named_modules() if path]
        with evaluating(base), ExitStack() as stack:
            for number, layer in enumerate(layers):
                stack.callback(layer.register_forward_hook(self._leave).remove)
                stack.callback(layer.register_forward_pre_hook(self._entering(number), with_kwargs=True).remove)
            for path, module in readers:
                stack.callback(module.register_forward_pre_hook(self._reading(path), with_kwargs=True).remove)
            if strict:
                stack.callback(base.register_forward_hook(_refuse_unread).remove)
            try:
                with torch.no_grad():
                    run()
            except NoFitError:
                raise
            except Exception as error:  # the layer's code may fail in any way on a stand-in
                raise NoFitError(f"does something else with its hidden state ({first_line(error)})") from error
        if not self.width:
            raise NoFitError("never calls its layers in a forward pass")

    def _note(self, kind: str, place: str) -> None:
        self.events.append((kind, self.now, place))

    def _entering(self, index: int) -> Callable:
        """Return the hook that runs when a layer is entered."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            self.now = index
            state = args[0] if args else kwargs.get("hidden_states")
            if index == 0:
                if not isinstance(state, Tensor):
                    raise NoFitError("does not give its layers a hidden state as first argument, or as hidden_states")
                self.width = state.shape[-1]
                return _replaced(args, kwargs, _HiddenState(state, self._note, self.strict))
            if not isinstance(state, _HiddenState):
                raise NoFitError("changes its hidden state between layers")
            if any(kind == "read" and where == _OUTSIDE for kind, where, _ in self.events):
                raise NoFitError("reads its hidden state between layers")
            return None

        return hook

    def _reading(self, place: str) -> Callable:
        """Return the hook of a module that may read the hidden state."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            state = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(state, _HiddenState):
                return None
            is_norm = len(args) + len(kwargs) == 1 and _removes_scale(module, state.value)
            if not is_norm and (self.norms_alone or (self.now == _OUTSIDE and not self.strict)):
                return None
            self._note("read", place)
            self.normed[self.now, place] = is_norm
            return _replaced(args, kwargs, state.value)

        return hook

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not isinstance(output[0] if isinstance(output, tuple) else output, _HiddenState):
            raise NoFitError(
                "has layers that put out something else than the sum: a norm or a gate follows the addition"
            )
        self.now = _OUTSIDE


def _refuse_unread(module: nn.Module, args: tuple, output: Any) -> None:
    states = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else (output,)
    if any(isinstance(state, _HiddenState) for state in states):
        raise NoFitError("has no final norm that reads the stream after the last layer")


def _replaced(args: tuple, kwargs: Mapping[str, Any], state: Any) -> tuple[tuple, dict]:
    return ((state, *args[1:]), dict(kwargs)) if args else (args, {**kwargs, "hidden_states": state})


def _removes_scale(module: nn.Module, like: Tensor) -> bool:
    """Return whether module(8x) = module(x), for x so large that an eps does not matter; on the meta device, judged by
    the module's name."""
    if like.is_meta:
        return "norm" in type(module).__name__.lower() and not list(module.children())
    x = torch.linspace(-64, 64, like.shape[-1], device=like.device, dtype=like.dtype).cos().mul_(1024).expand_as(like)
    try:
        small, large = module.forward(x), module.forward(8 * x)
    except Exception:  # a module of another kind may fail on such an input in any way
        return False
    return isinstance(small, Tensor) and small.shape == x.shape and torch.allclose(small, large, rtol=1e-2, atol=1e-4)


def _reads(events: list[tuple[str, int, str]], count: int, counts: Container[int]) -> tuple[str, ...]:
    """Return the reads that all layers share."""
    paths = set()
    for index in range(count):
        kinds = [kind for kind, at, _ in events if at == index]
        pairs = len(kinds) // 2
        if kinds.count("read") != kinds.count("write") or (pairs == 1 and 1 not in counts):
            raise NoFitError(
                f"has layers that {', '.join(kinds) or 'do nothing'}: attention and MLP read one stream side by side "
                f"(parallel residual) or a layer has one sublayer, where {PATTERN} is needed"
            )
        if kinds != ["read", "write"] * pairs or pairs not in counts:
            raise NoFitError(f"has layers that {', '.join(kinds)}: {PATTERN} is needed, two or three times in turn")
        paths.add(tuple(place for kind, at, place in events if at == index and kind == "read"))
    if len(paths) != 1:
        names = listed(sorted("/".join(places) for places in paths))
        raise NoFitError(f"has layers of several kinds, which read at {names}")
    return paths.pop()
