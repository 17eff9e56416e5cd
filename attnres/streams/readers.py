"""Modules that read a stream when given one: norms before sublayers and the head, and sublayers without a norm."""

from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.streams.exchange import Exchanged, exchange, own_class
from attnres.streams.inputs import Inputs
from attnres.streams.known_norm import is_rms_norm
from attnres.streams.stream import FINISHED, Stream, note_progress, passed_over


class _Reading(Exchanged):
    """Mixed into a norm's own class: reads when given a stream, norms when given a tensor."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(hidden_states, torch.fx.Proxy):
            raise TypeError(
                f"a {own_class(self).__name__} that reads a depth stream is more than its arithmetic: it cannot be "
                "traced by itself, nor replaced by another norm"
            )
        if not isinstance(hidden_states, Stream):
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
    """As `_Reading`, of the norm before the head."""

    def of_stream(self, stream: Stream) -> Tensor | Inputs:
        if self.training:  # layers at the end may be skipped
            stream = passed_over(stream, stream.residual("itself").num_sublayers)
        x = stream.finish(self)
        note_progress(FINISHED)
        return x


def make_reading(norm: nn.Module, *, last: bool = False) -> None:
    """Let this norm read streams. Its parameters, name and behaviour on tensors stay as they are.

    Args:
        last: it is the norm before the head.
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
    """Let an attention or an MLP that takes the stream with no norm before it read the stream. A hook: an attention's
    class stays what Transformers takes it for."""
    mixer.register_forward_pre_hook(_read_input, with_kwargs=True)


def still_reads(part: nn.Module, *, last: bool = False) -> bool:
    """Whether this module, or one inside of it where it is a wrapper, reads streams; `last`: as the norm before the
    head."""
    kind = _Finishing if last else _Reading
    return any(isinstance(m, kind) or _read_input in m._forward_pre_hooks.values() for m in part.modules())
