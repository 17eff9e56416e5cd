"""The state of the running pass of a base model: its progress, whether hidden states are wanted, and whether it is
under reentrant checkpointing."""

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
"""Whether the running pass has to return its hidden states; a bank does not store all of them."""

WAITING, STARTED, FINISHED = "waiting", "started", "finished"
_progress: ContextVar[str | None] = ContextVar("progress", default=None)


def note_progress(stage: str) -> None:
    """Record the progress of the running pass of a base model: `WAITING` for its first layer, its stream `STARTED`, or
    `FINISHED` by its last reader. Does nothing under a compiler, which has no context variables."""
    if not torch.compiler.is_compiling():
        _progress.set(stage)


def progress() -> str | None:
    """Return the progress of the running pass, or of the last one."""
    return _progress.get()


def reentrant(residual: nn.Module) -> Sequence[Any] | None:
    """Return the arguments of torch's reentrant checkpointing if it runs only layers (or a part) of the module that has
    the residual: it disables gradients, and passes on only those of tensors. None if it runs the whole module, which
    gets its gradients when it runs again, or if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return frame.f_locals["args"]
        if frame.f_code is _CALL and frame.f_locals["self"]._modules.get("residual") is residual:
            return None
        frame = frame.f_back
    return None
