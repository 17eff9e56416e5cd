"""The hidden state of a decoder as a stream: calling a pre-norm on it reads, `stream + output` writes.

A pre-norm layer's code already reads and writes, so no layer is copied or wrapped: the first layer's input becomes a
`Stream`, each pre-norm reads when it gets one, and the residual additions write.
"""

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from attnres.errors import UserError
from attnres.residuals import NormLike, Residual, Ways
from attnres.residuals.base import verbs
from attnres.residuals.state import as_it_is
from attnres.residuals.watch import unwatched
from attnres.streams.inputs import Inputs
from attnres.streams.known_norms import describe_norm
from attnres.streams.passes import REENTRANT_IS_REFUSED, reentrant

_ADDITIONS = {operator.add, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch._C.TensorBase.__add__}
"""The functions that torch, or Dynamo in an export, calls for an addition."""


OTHER_LAYERS = (
    "attach finds norms by example=(arguments of a pass), and with norms=None gives other layers one read each"
)
UNREAD = (
    "sublayer {} wrote before it read: one of its pre-norms is not named, or attention and MLP read side by side; "
    f"{OTHER_LAYERS}. A tool that changes a layer's output before its hooks run (nnsight) adds to the MLP's output "
    "instead"
)


def is_addition(func: Callable) -> bool:
    """Return whether a function passed to `__torch_function__` is `+`."""
    return func in _ADDITIONS


_OF_ALL = frozenset({"is_nested", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_floating_point", "layout", "numel"})
"""Attributes of tensors that are the same for every vector of a stream."""
_OF_GRAPH = frozenset({"backward", "register_hook", "retain_grad"})
"""Attributes of tensors about the autograd graph, which a sum computed only to be looked at does not have."""
_CHANGES = "a depth stream is several vectors, and nothing changes them in place: return `output + change`"


@dataclass(eq=False, repr=False)
class Stream:
    """The hidden state of one forward pass before sublayer `index`; never changed in place.

    `stream + output` is the stream after that sublayer. The object stores the state between a read and its write.
    `output` stays pending until the next read (or `hidden_state`) writes it into the state, so an addition between two
    sublayers, as by hooks on layers, is added to that output. For any other tensor attribute it behaves as the running
    sum, one vector a token, which is a plain model's hidden state. It is a dataclass because DDP and FSDP2 look into
    dataclasses for the tensors that a layer takes and returns.

    Attributes:
        state: the state before the last write; None if `output` is the embedding.
        like: the detached embedding, for shape, dtype and device.
        output: the pending output of sublayer `index - 1`, or None.
        values: the first layer's attention values (V), if a value residual mixes them into later layers'.
    """

    residual: nn.Module
    state: Any
    index: int
    like: Tensor
    output: Tensor | None = None
    values: Tensor | None = None
    call: Callable[..., Any] | None = None
    """Runs `read` and `write` of the residual (see `verbs`), found once a pass. None in a stream that pytree took apart
    and rebuilt: then the residual itself is called."""
    tracked: bool = False
    """Whether the pass began with gradients enabled."""

    # without annotations, so they are no fields: a stream made by `dataclasses.replace` has none of these values
    _after_read = None
    _inputs = None
    _written = None
    inside = False
    """Whether a sublayer of the running layer has written: the next one must read before it writes."""

    @classmethod
    def plain(cls, residual: nn.Module, embedding: Tensor) -> "Stream":
        """Begin a forward pass whose state can be taken out anywhere, with or without gradients."""
        tracked = torch.is_grad_enabled()
        return cls(residual, None, 0, embedding.detach(), embedding, call=verbs(residual), tracked=tracked)

    def written(self) -> Any:
        """Return the state with the last output written.

        With gradients the result is not stored on the stream: a checkpointed layer repeats its reads in the backward
        pass, and would find the state of the forward pass.
        """
        if self.output is None:
            return self.state
        if self._written is not None:
            return self._written
        call = self.residual if self.call is None else self.call
        if self.state is None:
            state = call("start", self.output)
        else:
            state = call("write", self.state, self.index - 1, self.output)
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._written = state
        return state

    def read(self, norm: Any) -> Tensor | Inputs:
        """Return the input of the next sublayer, or of the head after the last one; normed unless `norm` is None."""
        if self.tracked and not torch.is_grad_enabled() and reentrant(self.residual) is not None:
            raise UserError(REENTRANT_IS_REFUSED)
        spec = self.spec(norm)
        inner = self.residual if isinstance(self.residual, Residual) else self.residual("itself")
        call = self.residual if self.call is None else self.call
        if self.index == inner.num_sublayers:
            return call("finish", self.written(), spec)
        x, self._after_read = call("read", self.written(), self.index, spec)
        if inner.value_mix is not None:
            return self._with_values(x, inner)
        return Inputs.of(x) if isinstance(x, Ways) else x

    def spec(self, norm: Any) -> NormLike:
        """Return the norm after a read: as a value if its arithmetic is known, else as a function."""
        return as_it_is if norm is None else describe_norm(norm, self.like)

    def _with_values(self, x: Tensor | Ways, inner: Residual) -> Tensor | Inputs:
        """Return the input of the next sublayer, with the first layer's values for attentions that mix them in."""
        kinds, mixes = inner.sublayers, inner.value_mix
        if mixes is not None and kinds[self.index % len(kinds)] == "attention":
            layer = self.index // len(kinds)
            self._inputs = Inputs.of(
                x, layer=layer, first=self.values, mix=self.residual, replaces=mixes.replaces and layer > 0
            )
            return self._inputs
        return Inputs.of(x) if isinstance(x, Ways) else x

    def finish(self, norm: nn.Module) -> Tensor | Inputs:
        """Return the normed input of the head.

        Raises:
            TypeError: not every sublayer has read and written.
        """
        count = self.residual("itself").num_sublayers
        if self.index != count:
            raise TypeError(
                f"{self.index} of {count} sublayers have read the stream and written to it: is each of its pre-norms "
                "named? Depth reads take no pass that leaves layers out (assistant_early_exit)"
            )
        return self.read(norm)

    def __add__(self, output: Any) -> Any:
        if isinstance(output, Stream):
            return self.hidden_state() + output.hidden_state()
        state, self._after_read = self._after_read, None
        if state is None and (self.inside or self.output is None):
            raise UserError(UNREAD.format(self.index))
        if state is None:  # before the first sublayer `output` is the embedding, which is changed
            return dataclasses.replace(self, output=(cast(Tensor, self.output) + output).to(self.dtype))
        inputs, self._inputs = self._inputs, None
        values = self.values if inputs is None else inputs.first
        after = type(self)(self.residual, state, self.index + 1, self.like, output, values, self.call, self.tracked)
        after.inside = True
        return after

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.hidden_state() - other.hidden_state() if isinstance(other, Stream) else self + (-other)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # A tensor on the left (`output + stream`) and torch.compile come here.
        if is_addition(func) and not kwargs:
            left, right = args
            return left.__add__(right) if isinstance(left, Stream) else right.__add__(left)
        # Dynamo calls this for a checkpointed layer, Python does not: the layer takes the stream itself
        if func is checkpoint:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
            raise TypeError(f"torch's '{name}' was given a depth stream: {_CHANGES}")
        args, kwargs = _pytree.tree_map_only(
            Stream, lambda one: one.hidden_state(), (args, kwargs or {}), is_leaf=lambda one: isinstance(one, Stream)
        )
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_base":  # it is no view of a tensor (Megatron tests this)
            return None
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"a depth stream has no '{name}'")
        if name in _OF_ALL:
            return getattr(self.like, name)
        if name.endswith("_"):
            raise TypeError(f"'{name}' of a depth stream was asked: {_CHANGES}")
        if name in _OF_GRAPH:
            raise TypeError(
                f"'{name}' of a depth stream was asked, and no tensor of it has the gradient of a hidden state: ask it "
                "of what an attention or an MLP puts out"
            )
        return getattr(self.hidden_state(), name)

    def to(self, *args: Any, **kwargs: Any) -> "Stream":
        """Return the stream with all its tensors moved or cast, as offloading code does with arguments."""
        if self.like.to(*args, **kwargs) is self.like:
            return self
        return _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(*args, **kwargs), self)

    def __getitem__(self, place: Any) -> Tensor:
        return self.hidden_state()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        raise TypeError(f"a part of a depth stream was set: {_CHANGES}")

    def __mul__(self, factor: Any) -> Tensor:
        return self.hidden_state() * factor

    __rmul__ = __mul__

    def hidden_state(self) -> Tensor:
        """Return the stream as one vector a token, for code that uses hidden states."""
        inner = self.residual("itself")
        if not inner.watched or self._written is not None:
            return self.residual("hidden_state", self.written())
        with unwatched(inner):  # the next read shows the output, so nothing stored here may be used
            return self.residual("hidden_state", dataclasses.replace(self).written())

    # Other attributes that decoders ask of a hidden state, which need no sum.
    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def ndim(self) -> int:
        return self.like.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def requires_grad(self) -> bool:
        return self.output is not None and self.output.requires_grad

    def size(self, *dim: int) -> Any:
        return self.like.size(*dim)

    def dim(self) -> int:
        return self.like.ndim


def _flatten(stream: Stream) -> tuple[list[Any], tuple[nn.Module, int, bool]]:
    return [stream.state, stream.like, stream.output, stream.values], (stream.residual, stream.index, stream.tracked)


def _unflatten(parts: Any, context: tuple[nn.Module, int, bool]) -> Stream:
    state, like, output, values = parts
    return Stream(context[0], state, context[1], like, output, values, tracked=context[2])


_pytree.register_pytree_node(Stream, _flatten, _unflatten)
