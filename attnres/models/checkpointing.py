"""What a model makes again in the backward pass instead of keeping it: activation (gradient) checkpointing."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnres.errors import UserError


def checkpoint_activations(model: Any, how: str) -> None:
    """Let a model with a residual keep less for its backward pass; gradients stay what they are.

    Args:
        how: "none"; "layer": of each layer its input is kept, the stream; "sublayer": of each attention and MLP its
            normed input, with all that the stream itself keeps; "reads": everything but what reads of the stream make.

    Raises:
        UserError: its layers know no checkpointing, or have no attention and no MLP.
    """
    if how == "layer":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(
                f"layers of {type(model).__name__} know no checkpointing: choose sublayer or reads"
            ) from error
    elif how == "sublayer":
        for layer in model.depth_layers:
            mixers = list(_mixers(layer, model.family.reads))
            if not mixers:
                raise UserError(f"no attention and no MLP is found in {type(layer).__name__}: choose layer or reads")
            for mixer in mixers:
                mixer.forward = functools.partial(_made_again, mixer, mixer.forward)
    elif how == "reads":
        model.residual.recompute_reads = True


def _mixers(part: nn.Module, reads: Sequence[str]) -> Iterator[nn.Module]:
    """Yield a layer's attention, MLP and the like: what has matrices and is called on what a read gives.

    Args:
        reads: paths in `part` of what reads the stream. What holds one of these takes the stream itself.
    """
    for name, child in part.named_children():
        inside = [path.removeprefix(f"{name}.") for path in reads if path.startswith(f"{name}.")]
        if inside or isinstance(child, nn.ModuleList):
            yield from _mixers(child, inside)
        elif any(parameter.ndim > 1 for parameter in child.parameters()):
            yield child


def _made_again(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module's own forward, in training so that its inside is made again for the backward pass."""
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
