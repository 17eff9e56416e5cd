"""The hidden state of a decoder as a stream: calling a pre-norm on it reads, `stream + output` writes.

A pre-norm layer's own code already says the two verbs, so no layer is copied or wrapped: the first layer's input
becomes a `Stream`, each pre-norm reads when it is given one, and the residual additions write.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from attnres.models.exchange import Exchanged, exchange, own_class
from attnres.models.inputs import Inputs
from attnres.ops.norms import Norm
from attnres.residuals import Residual, Ways
from attnres.residuals.base import as_it_is

_ADDITIONS = frozenset(
    {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch._C.TensorBase.__add__}
)


def is_addition(func: Callable) -> bool:
    """Whether a function that torch hands to `__torch_function__` is `+`."""
    return func in _ADDITIONS


@dataclass(eq=False)
class Stream:
    """One forward pass of a network's depth, before sublayer `index`; never changed in place.

    `stream + output` is the stream after that sublayer. What a read hands to its write is kept on the object between
    the two, and dropped by the write. A dataclass, because that is where DDP and FSDP2 look for a layer's tensors.

    Attributes:
        values: the first layer's, where later layers' take something from them.
    """

    residual: nn.Module
    state: Any
    index: int
    like: Tensor
    values: Tensor | None = None

    def __post_init__(self) -> None:
        self._after_read: Any = None  # no field: `dataclasses.replace` starts it anew
        self._inputs: Inputs | None = None

    @classmethod
    def start(cls, residual: nn.Module, embedding: Tensor) -> "Stream":
        """Begin a forward pass. `residual` is a `Residual`, or what wraps one: it is called for every verb, so that the
        wrapper's parameters and hooks are those that count."""
        inner: Residual = residual("itself")
        for watcher in (inner.observer, inner.editor):
            if watcher is not None:
                watcher.on_start(embedding)
        return cls(residual, residual("start", embedding), 0, embedding.detach())

    def read(self, norm: nn.Module | None) -> Tensor | Inputs:
        """The input of the coming sublayer, or of the head after the last one; normed unless `norm` is None."""
        spec = as_it_is if norm is None else describe_norm(norm, self.like)
        inner: Residual = self.residual("itself")
        if self.index == inner.num_sublayers:
            return self.residual("finish", self.state, spec)
        x, self._after_read = self.residual("read", self.state, self.index, spec)
        kinds, mixes = inner.sublayers, inner.value_residual
        if mixes is not None and kinds[self.index % len(kinds)] == "attention":
            layer = self.index // len(kinds)
            self._inputs = Inputs.of(
                x, layer=layer, first=self.values, mix=self.residual, replaces=mixes.replaces and layer > 0
            )
            return self._inputs
        return Inputs.of(x) if isinstance(x, Ways) else x

    def __add__(self, output: Tensor) -> "Stream":
        state, self._after_read = self._after_read, None
        inputs, self._inputs = self._inputs, None
        if state is None:
            raise TypeError(
                f"sublayer {self.index} wrote before it read: is each of its pre-norms named in its family?"
            )
        inner: Residual = self.residual("itself")
        for watcher in (inner.observer, inner.editor):
            if watcher is not None:
                watcher.on_write(self.index, output)
        values = self.values if inputs is None else inputs.first
        state = self.residual("write", state, self.index, output)
        return Stream(self.residual, state, self.index + 1, self.like, values)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> "Stream":
        # A tensor on the left (`output + stream`) and torch.compile come here.
        if not is_addition(func) or kwargs:
            name = getattr(func, "__name__", func)
            raise TypeError(f"a depth stream was given to torch's '{name}': layers may only norm it and add to it")
        left, right = args
        return left.__add__(right) if isinstance(left, Stream) else right.__add__(left)

    def hidden_state(self) -> Tensor:
        """The stream as one vector a token, for those who look at hidden states."""
        return self.residual("hidden_state", self.state)

    # What decoders ask of a hidden state besides.
    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    def size(self, *dim: int) -> Any:
        return self.like.size(*dim)


def _flatten(stream: Stream) -> tuple[list[Any], tuple[nn.Module, int]]:
    return [stream.state, stream.like, stream.values], (stream.residual, stream.index)


def _unflatten(parts: Any, context: tuple[nn.Module, int]) -> Stream:
    state, like, values = parts
    return Stream(context[0], state, context[1], like, values)


_pytree.register_pytree_node(Stream, _flatten, _unflatten)


def _forward(module: nn.Module) -> Callable:
    """The forward of a norm's own class."""
    return own_class(module).forward


def describe_norm(module: nn.Module, like: Tensor) -> Norm | nn.Module:
    """A pre-norm as a value, where its arithmetic is known; else the module itself.

    Under autocast the normed vector comes out in the autocast dtype, since only matrix products consume it.
    """
    device = like.device.type
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if isinstance(module, nn.LayerNorm) and _forward(module) is nn.LayerNorm.forward:
        return Norm(module.weight, module.bias, module.eps, center=True, out_dtype=out_dtype)
    eps = getattr(module, "variance_epsilon", None)  # the RMSNorm that most families copy from each other
    if eps is not None:
        return Norm(cast(Tensor, module.weight), None, eps, out_dtype=out_dtype)
    return module


class _Reading(Exchanged):
    """Mixed into a norm's own class: reads when given a stream, norms when given a tensor."""

    def forward(self, hidden_states: Any) -> Tensor | Inputs:
        if isinstance(hidden_states, Stream):
            return hidden_states.read(self)
        return super().forward(hidden_states)


def make_reading(norm: nn.Module) -> None:
    """Let this norm read streams. Its parameters, name and behaviour on tensors stay as they are."""
    exchange(norm, _Reading)


def _read_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    if args and isinstance(args[0], Stream):
        return (args[0].read(None), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Stream):
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].read(None)}
    return None


def make_taking(mixer: nn.Module) -> None:
    """Let an attention or an MLP that takes the stream with no norm before it read the stream. A hook: an attention's
    class stays what Transformers takes it for."""
    mixer.register_forward_pre_hook(_read_input, with_kwargs=True)
