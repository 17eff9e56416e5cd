"""An attention whose projections have inputs of their own, or whose values take something from the first layer's.

Its own code is left alone. In place of a hidden state it is given `Inputs`, which says what a hidden state would of its
shape, and hands it to its projections; each of them takes its part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.residuals import Ways
from attnres.streams.known_norms import Exchanged, exchange


class _MisusedError(TypeError, AttributeError):
    """Something else was asked of inputs than what they stand for."""


@dataclass(eq=False)
class Inputs:
    """One attention's inputs in one forward pass, (..., d) each.

    Attributes:
        layer, first: where there is a value residual, the layer's number and the first layer's values, which layer 0
            fills in. mix: the residual whose verb mixes values, or None. replaces: the first layer's take their place.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layer: int = 0
    first: Tensor | None = None
    mix: nn.Module | None = None
    replaces: bool = False

    @classmethod
    def of(cls, x: Tensor | Ways, **values: Any) -> "Inputs":
        """Of a read: one vector for all three projections, or one for each."""
        return cls(*(x if isinstance(x, Ways) else (x, x, x)), **values)

    def values(self, value: Tensor) -> Tensor:
        """Return what attention uses and caches in place of its own `value` (..., heads * head_dim)."""
        if self.mix is None:
            return value
        if self.layer == 0:
            self.first = value
            return value
        return self.mix("mix_values", self.layer, value, self.first, self.value)

    # What attentions ask of a hidden state besides.
    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    def size(self, *dim: int) -> Any:
        return self.value.size(*dim)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _MisusedError(f"'{name}' of an attention's inputs was asked: its projections may take them, nothing else")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", func)
        raise TypeError(f"an attention's inputs were given to torch's '{name}': its projections may take them alone")


class Fused(NamedTuple):
    """How one projection's output (..., O) holds queries, keys and values.

    Attributes:
        heads, shared: of queries, and of keys and values each, all of one size.
        by_head: query, key and value of the first head, then of the second; else all queries, all keys, all values.
    """

    heads: int
    shared: int
    by_head: bool

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Return queries, keys and values, (..., heads * head_dim) each."""
        if self.by_head:
            return [part.flatten(-2) for part in whole.unflatten(-1, (self.heads, 3, -1)).unbind(-2)]
        size = whole.shape[-1] // (self.heads + 2 * self.shared)
        return list(whole.split([self.heads * size, self.shared * size, self.shared * size], -1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo `cut`."""
        if self.by_head:
            return torch.stack([part.unflatten(-1, (self.heads, -1)) for part in parts], -2).flatten(-3)
        return torch.cat(list(parts), -1)


class _Taking(Exchanged):
    """Mixed into a projection's own class: takes its part of `Inputs`, and tensors as ever. A fused one is called for
    each of three inputs, and gives of each result the part that is asked for."""

    way: str | Fused

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(x, Inputs):
            return super().forward(x, *args, **kwargs)
        way = self.way
        if isinstance(way, Fused):
            query, key, value = way.cut(super().forward(x.value, *args, **kwargs))
            if x.query is not x.value:
                query = way.cut(super().forward(x.query, *args, **kwargs))[0]
                key = way.cut(super().forward(x.key, *args, **kwargs))[1]
            return way.join([query, key, x.first if x.replaces and x.first is not None else x.values(value)])
        if way == "query":
            return super().forward(x.query, *args, **kwargs)
        if way == "key":
            return super().forward(x.key, *args, **kwargs)
        if x.replaces and x.first is not None:
            return x.first
        return x.values(super().forward(x.value, *args, **kwargs))


class _Splitting(Exchanged):
    """Mixed into an attention's own class: what is put in a projection's place, as adapters do, takes its part too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        way = self.__dict__.get("ways", {}).get(name)
        if way is not None:
            exchange(value, _Taking)
            value.way = way


def split(layers: Sequence[nn.Module], projections: Sequence[str], fused: Fused, what: str, name: str) -> None:
    """Let the attention of every layer take `Inputs`.

    Args:
        projections: paths in a layer of those of queries, keys and values, or of the one that makes all.
        fused: how that one's output holds them; its heads are also those of projections of their own.
        what, name: what asks for it, and the model's class, for messages.

    Raises:
        UserError: a layer has no such projections, or its input goes elsewhere too.
    """
    names = [path.rpartition(".")[2] for path in projections]
    ways = dict(zip(names, Ways._fields if len(names) == len(Ways._fields) else [fused]))
    for number, layer in enumerate(layers):
        refusal = _refusal(layer, projections, fused)
        if refusal is not None:
            raise UserError(
                f"{what} needs the attention's projections of queries, keys and values, and layer {number} of {name} "
                f"{refusal}: choose another family, such as qwen3 or llama"
            )
        attention: Any = layer.get_submodule(projections[0].rpartition(".")[0])
        exchange(attention, _Splitting)
        attention.ways = ways
        for child in names:
            setattr(attention, child, getattr(attention, child))


def _refusal(layer: nn.Module, projections: Sequence[str], fused: Fused) -> str | None:
    """Say why a layer's attention cannot take `Inputs`; None where it can."""
    modules = dict(layer.named_modules())
    missing = [path for path in projections if path not in modules]
    if missing or not projections:
        return f"has no {missing[0]}" if missing else "has none that are named"
    attention = modules[projections[0].rpartition(".")[0]]
    names = [path.rpartition(".")[2] for path in projections]
    others = [n for n, child in attention.named_children() if isinstance(child, nn.Linear) and n not in names]
    if len(others) > 1:  # one is the projection of its output
        return f"has further ones ({', '.join(others)})"
    parts = fused.shared if len(projections) == len(Ways._fields) else fused.heads + 2 * fused.shared
    last = modules[projections[-1]]
    size = getattr(last, "out_features", getattr(last, "nf", 0))
    return f"has {size} channels of {projections[-1]} for {parts} heads" if not size or size % parts else None
