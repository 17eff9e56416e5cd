"""State of the running pass of a base model: how far it is, whether its hidden states are wanted, and whether it is
checkpointed the reentrant way."""

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

REENTRANT_IS_REFUSED = (
    "reentrant checkpointing runs the layers of a depth stream, whose gradients it would drop: checkpoint them with "
    "use_reentrant=False"
)
_REENTRANT, _CALL = CheckpointFunction.forward.__code__, nn.Module._wrapped_call_impl.__code__

hidden_states_wanted: ContextVar[bool] = ContextVar("hidden_states_wanted", default=False)
"""Whether the running pass is asked for its hidden states, all of which a bank does not keep."""

WAITING, STARTED, FINISHED = "waiting", "started", "finished"
_progress: ContextVar[str | None] = ContextVar("progress", default=None)


def note_progress(stage: str) -> None:
    """Take note of how far the running pass of a base model is: `WAITING` for its first layer, its stream `STARTED`, or
    `FINISHED` by what reads it last. Not under a compiler, which has no context variables."""
    if not torch.compiler.is_compiling():
        _progress.set(stage)


def progress() -> str | None:
    """Return how far the running pass, or the last one, is."""
    return _progress.get()


def reentrant(residual: nn.Module) -> Sequence[Any] | None:
    """Return what torch's reentrant checkpointing was given, where it runs layers of the module that has the residual,
    or a part of one: with gradients off, and passing on those of tensors alone. None where it runs all of that module,
    or nothing: then the gradients are made when it runs again."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return frame.f_locals["args"]
        if frame.f_code is _CALL and frame.f_locals["self"]._modules.get("residual") is residual:
            return None
        frame = frame.f_back
    return None
