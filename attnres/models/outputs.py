"""Extra outputs of a forward pass: hidden states, as a plain model gives them, and the weights of reads."""

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.residuals import Observer, watched_by
from attnres.streams.passes import hidden_states_wanted
from attnres.streams.readers import Parts
from attnres.streams.stream import Stream


def note_hidden_states(parts: Parts, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note whether the starting pass is asked for its hidden states."""
    option = kwargs.get("output_hidden_states")
    option = getattr(base.config, "output_hidden_states", None) if option is None else option
    parts.shown = option is not None and option is not False
    if not torch.compiler.is_compiling():  # a compiled pass has no context variables, and takes no bank
        hidden_states_wanted.set(parts.shown)


def show_hidden_states(base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """With `output_hidden_states`, replace each stream by its running sum, the hidden state of a plain model."""
    if not torch.compiler.is_compiling():
        hidden_states_wanted.set(False)

    def vectors(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(v.hidden_state() if isinstance(v, Stream) else v for v in value)
        return value

    if type(output) is tuple:  # return_dict=False
        return tuple(map(vectors, output))
    for name in ("hidden_states", "decoder_hidden_states"):
        if getattr(output, name, None) is not None:
            setattr(output, name, vectors(getattr(output, name)))
    return output


_observing = threading.RLock()
"""Held while a residual is observed, since it has a single observer: threads take turns."""


class _Weights:
    """Collects the routing weights of this thread's forward pass, and forwards all events to the previous observer."""

    def __init__(self, before: Observer | None) -> None:
        self.before, self.reads = before, list[Tensor]()
        self.shape, self.thread = torch.Size(), threading.get_ident()

    def on_start(self, embedding: Tensor) -> None:
        if self.thread == threading.get_ident():
            self.shape = embedding.shape[:-1]
        if self.before is not None:
            self.before.on_start(embedding)

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        if self.thread == threading.get_ident():
            if weights is None:
                raise UserError("output_routing_weights was asked of a residual that weighs no sources: leave it out")
            self.reads.append(weights.detach().view(*self.shape, -1))
        if self.before is not None:
            self.before.on_read(read, h, weights, values)

    def on_write(self, index: int, output: Tensor) -> None:
        if self.before is not None:
            self.before.on_write(index, output)


def routing_forward(base_forward: Callable) -> Callable:
    """Return a family's forward with an additional argument, `output_routing_weights`."""

    @functools.wraps(base_forward)
    def forward(self: Any, *args: Any, output_routing_weights: bool = False, **kwargs: Any) -> Any:
        if not output_routing_weights:
            return base_forward(self, *args, **kwargs)
        residual = self.residual("itself")
        with _observing:
            weights = _Weights(residual.observer)
            with watched_by(residual, observer=weights):
                output = base_forward(self, *args, **{**kwargs, "return_dict": True})
        output["routing_weights"] = tuple(weights.reads)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    signature = inspect.signature(base_forward)
    extra = inspect.Parameter("output_routing_weights", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    *first, last = signature.parameters.values()
    places = [*first, extra, last] if last.kind is last.VAR_KEYWORD else [*first, last, extra]
    forward.__signature__ = signature.replace(parameters=places)  # ty: ignore[missing-attribute]
    return forward
