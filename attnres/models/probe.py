"""Where a Transformer that nobody listed reads and writes its stream, found by watching one forward pass.

The first layer is given a stand-in for its hidden state that notes which module is called on it and when something is
added to it, and refuses everything else. One whose layers read, write, read and write, and whose final norm reads last,
has depth reads; any other is refused with what it does instead. Reads are norms first of all, wherever in a layer they
stand; where that does not fit, whatever is called on the stream.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnres.errors import UserError, first_line
from attnres.head import evaluating
from attnres.models.exactness import fixed_inputs, logits
from attnres.models.families import Family, layer_count
from attnres.streams.stream import is_addition
from attnres.text import listed

_KINDS = {2: ("attention", "mlp"), 3: ("attention", "cross_attention", "mlp")}
"""What the sublayers of a layer are, by their number."""
_PATTERN = "read, write, read, write"
_OUTSIDE = -1


class _NoFitError(Exception):
    """Why a decoder does not follow the pattern."""


class _Watched:
    """A hidden state that notes what is done with it."""

    def __init__(self, value: Tensor, note: Callable[[str, str], None]) -> None:
        self.value, self.note = value, note

    def __add__(self, output: Any) -> "_Watched":
        if isinstance(output, _Watched):
            raise _NoFitError("adds its hidden state to itself")
        self.note("write", "")
        return _Watched(self.value + output, self.note)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> "_Watched":
        if not is_addition(func) or kwargs:
            raise _NoFitError(f"gives its hidden state to torch's '{getattr(func, '__name__', func)}'")
        left, right = args
        return left + right if isinstance(left, _Watched) else right + left

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "size"):
            return getattr(self.value, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoFitError(f"uses '{name}' of its hidden state")


def probe(model: PreTrainedModel) -> Family:
    """The family of this model, by a forward pass over four tokens (or a picture, or a sound) without gradients.

    Raises:
        UserError: it does not follow the pattern, with the reason.
    """
    name = type(model).__name__
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    try:
        path, layers = _find_layers(base, model.config)
        try:
            forward = _Pass(model, base, layers, norms_alone=True)
            reads = _reads(forward.events, len(layers))
        except _NoFitError:
            forward = _Pass(model, base, layers, norms_alone=False)
            reads = _reads(forward.events, len(layers))
        final = [place for kind, index, place in forward.events if index == _OUTSIDE and kind == "read"]
        if len(final) != 1 or not forward.normed[_OUTSIDE, final[0]]:
            raise _NoFitError("has no final norm that reads the stream after the last layer")
    except _NoFitError as reason:
        raise UserError(f"{name} cannot have depth reads: it {reason}") from None
    return Family(
        sublayers=_KINDS[len(reads)],
        config=type(model.config).__name__,
        causal_lm=name,
        layers=path,
        reads=reads,
        final_norm=final[0],
        normed=all(forward.normed[index, place] for index in range(len(layers)) for place in reads),
        branch_weights=(),
    )


def _find_layers(base: Any, config: Any) -> tuple[str, nn.ModuleList]:
    """Path and layers of the text's decoder, or of all there is."""
    count = layer_count(config)
    inside, prefix = base, ""
    if config.is_encoder_decoder or config.get_text_config() is not config:
        inside = base.get_decoder()
        prefix = next((path for path, module in base.named_modules() if module is inside and path), "")
    named = [(path, m) for path, m in inside.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not named:
        raise _NoFitError(f"has no list of {count} layers")
    path, layers = max(named, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return f"{prefix}.{path}" if prefix else path, layers


class _Pass:
    """What one forward pass reads from its stream and writes there.

    Attributes:
        events: (kind, layer, path) of each read and write.
        normed: of each read whether a norm makes it.
        norms_alone: other modules that are called on the stream pass it on to what is inside of them.
    """

    def __init__(self, model: PreTrainedModel, base: nn.Module, layers: nn.ModuleList, *, norms_alone: bool) -> None:
        """Pass a few tokens through the model. Raises _NoFitError."""
        self.norms_alone = norms_alone
        self.events: list[tuple[str, int, str]] = []
        self.normed: dict[tuple[int, str], bool] = {}
        self.now = _OUTSIDE  # the layer
        inside = {id(m) for layer in layers for m in layer.modules()}
        above = {id(m) for path, m in base.named_modules() if any(x is layers for x in m.modules())} | {id(layers)}
        readers = [(path, m) for path, m in base.named_modules() if id(m) not in inside | above]
        readers += [(path, m) for layer in layers for path, m in layer.named_modules() if path]
        with evaluating(model), ExitStack() as stack:
            handles = [layer.register_forward_hook(self._leave) for layer in layers]
            handles += [
                layer.register_forward_pre_hook(self._entering(i), with_kwargs=True) for i, layer in enumerate(layers)
            ]
            handles += [m.register_forward_pre_hook(self._reading(path), with_kwargs=True) for path, m in readers]
            handles.append(base.register_forward_hook(_end))
            for handle in handles:
                stack.callback(handle.remove)
            try:
                logits(model, fixed_inputs(model, 4))
            except _NoFitError:
                raise
            except Exception as error:  # whatever its code does with what is no tensor
                raise _NoFitError(f"does something else with its hidden state ({first_line(error)})") from error

    def _note(self, kind: str, place: str) -> None:
        self.events.append((kind, self.now, place))

    def _entering(self, index: int) -> Callable:
        """Return the hook of what enters a layer."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            self.now = index
            state = args[0] if args else kwargs.get("hidden_states")
            if index == 0:
                if not isinstance(state, Tensor):
                    raise _NoFitError("does not give its layers a hidden state")
                return _replaced(args, kwargs, _Watched(state, self._note))
            if not isinstance(state, _Watched):
                raise _NoFitError("changes its hidden state between layers")
            return None

        return hook

    def _reading(self, place: str) -> Callable:
        """Return the hook of a module that may read the stream."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            state = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(state, _Watched):
                return None
            is_norm = len(args) + len(kwargs) == 1 and _removes_scale(module, state.value)
            if self.norms_alone and not is_norm:
                return None
            self._note("read", place)
            self.normed[self.now, place] = is_norm
            return _replaced(args, kwargs, state.value)

        return hook

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not isinstance(output[0] if isinstance(output, tuple) else output, _Watched):
            raise _NoFitError(
                "has layers that put out something else than the sum: a norm or a gate follows the addition"
            )
        self.now = _OUTSIDE


def _end(module: nn.Module, args: tuple, output: Any) -> None:
    states = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else (output,)
    if any(isinstance(state, _Watched) for state in states):
        raise _NoFitError("has no final norm that reads the stream after the last layer")


def _replaced(args: tuple, kwargs: dict, state: Any) -> tuple[tuple, dict]:
    return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": state})


def _removes_scale(module: nn.Module, like: Tensor) -> bool:
    """Whether module(8x) = module(x), for x so large that an eps does not matter."""
    x = torch.linspace(-64, 64, like.shape[-1], device=like.device, dtype=like.dtype).cos().mul_(1024).expand_as(like)
    try:
        small, large = module.forward(x), module.forward(8 * x)
    except Exception:  # a module of another kind may refuse such an input in its own way
        return False
    return isinstance(small, Tensor) and small.shape == x.shape and torch.allclose(small, large, rtol=1e-2, atol=1e-4)


def _reads(events: list[tuple[str, int, str]], count: int) -> tuple[str, ...]:
    """The reads that all layers share."""
    paths = set()
    for index in range(count):
        kinds = [kind for kind, at, _ in events if at == index]
        if kinds.count("read") != kinds.count("write") or len(kinds) == 2:
            raise _NoFitError(
                f"has layers that {', '.join(kinds) or 'do nothing'}: attention and MLP read one stream side by side "
                f"(parallel residual) or a layer has one sublayer, where {_PATTERN} is needed"
            )
        if kinds != ["read", "write"] * (len(kinds) // 2) or len(kinds) // 2 not in _KINDS:
            raise _NoFitError(f"has layers that {', '.join(kinds)}: {_PATTERN} is needed, two or three times in turn")
        paths.add(tuple(place for kind, at, place in events if at == index and kind == "read"))
    if len(paths) != 1:
        names = listed(sorted("/".join(places) for places in paths))
        raise _NoFitError(f"has layers of several kinds, which read at {names}")
    return paths.pop()
