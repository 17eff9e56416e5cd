"""Give an attention a separate input for each projection, or values mixed with the first layer's.

The attention's code is unchanged. In place of a hidden state it gets `Inputs`, which has a hidden state's shape, and
passes them to its projections; each takes its part.
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
    """Raised if an operation other than a projection is applied to `Inputs`."""


@dataclass(eq=False)
class Inputs:
    """The inputs of one attention in one forward pass, (..., d) each.

    Attributes:
        layer, first: with a value residual, the layer's number and the first layer's values, which layer 0 fills in.
            mix: the residual that mixes values, or None. replaces: whether the first layer's values replace later ones.
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
        """Make inputs from a read: one vector for all three projections, or one for each."""
        return cls(*(x if isinstance(x, Ways) else (x, x, x)), **values)

    def values(self, value: Tensor) -> Tensor:
        """Return the values for attention to use and cache in place of its own `value` (..., heads * head_dim)."""
        if self.mix is None:
            return value
        if self.layer == 0:
            self.first = value
            return value
        return self.mix("mix_values", self.layer, value, self.first, self.value)

    # Other attributes that attentions ask of a hidden state.
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
    """The layout of queries, keys and values in the output (..., O) of one fused projection.

    Attributes:
        heads, shared: number of heads of queries, and of keys and values each, all of one size.
        by_head: query, key and value of the first head, then of the second, ...; else all queries, all keys, all
            values.
    """

    heads: int
    shared: int
    by_head: bool

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Split into queries, keys and values, (..., heads * head_dim) each."""
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
    """Mixin for a projection: takes its part of `Inputs`, and tensors as before. A fused projection is called on each
    of three inputs, and returns the needed part of each result."""

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
    """Mixin for an attention: a module that replaces a projection, as adapters do, takes its part too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        way = self.__dict__.get("ways", {}).get(name)
        if way is not None:
            exchange(value, _Taking)
            value.way = way


def split(layers: Sequence[nn.Module], projections: Sequence[str], fused: Fused, what: str, name: str) -> None:
    """Let the attention of every layer take `Inputs`.

    Args:
        projections: paths in a layer of the projections of queries, keys and values, or of the fused one.
        fused: the layout of the fused projection's output; its numbers of heads also apply to separate projections.
        what, name: the feature that needs it, and the model's class, for messages.

    Raises:
        UserError: a layer has no such projections, or other modules take its input too.
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
    """Return the reason why a layer's attention cannot take `Inputs`; None if it can."""
    modules = dict(layer.named_modules())
    missing = [path for path in projections if path not in modules]
    if missing or not projections:
        return f"has no {missing[0]}" if missing else "has none that are named"
    attention = modules[projections[0].rpartition(".")[0]]
    names = [path.rpartition(".")[2] for path in projections]
    others = [n for n, child in attention.named_children() if isinstance(child, nn.Linear) and n not in names]
    if len(others) > 1:  # one other is the output projection
        return f"has further ones ({', '.join(others)})"
    parts = fused.shared if len(projections) == len(Ways._fields) else fused.heads + 2 * fused.shared
    last = modules[projections[-1]]
    size = getattr(last, "out_features", getattr(last, "nf", 0))
    return f"has {size} channels of {projections[-1]} for {parts} heads" if not size or size % parts else None
