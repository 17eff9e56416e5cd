"""Remove depth reads from a module, disable them for a while, and load checkpoints that have none."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from attnres.errors import UserError
from attnres.residuals import Residual
from attnres.streams.meta import Uninitialised
from attnres.streams.readers import make_plain, parts_in


def detach(module: nn.Module) -> Residual:
    """Undo `attach`: the module is again the original one, with its present weights.

    >>> import torch
    >>> from attnres.streams.attach import attach
    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)
    >>> residual = attach(encoder, "full", example=(torch.randn(1, 3, 16),))
    >>> detach(encoder) is residual
    True

    Returns:
        The residual, which is no longer a part of the module.

    Raises:
        UserError: nothing is attached to it, or it was made by `attnres.convert` or `build`.
    """
    parts = [one for one in parts_in(module) if one.attached]
    if not parts:
        raise UserError(
            f"nothing is attached to this {type(module).__name__}: expected a module that attnres.attach was given"
        )
    for part in module.modules():
        make_plain(part)
    residual: Any = parts[0].base.residual
    for one in parts:
        del one.base.residual
    return residual


@contextmanager
def disabled(module: nn.Module) -> Generator[None]:
    """Let a module with depth reads, attached or converted, compute without them inside the block.

    >>> import torch
    >>> from attnres.streams.attach import attach
    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)
    >>> x, residual = torch.randn(1, 3, 16), attach(encoder, "full")
    >>> with disabled(encoder):
    ...     encoder(x).shape
    torch.Size([1, 3, 16])

    Raises:
        UserError: the module has no depth reads.
    """
    parts = parts_in(module)
    if not parts:
        raise UserError(
            f"nothing in this {type(module).__name__} has depth reads by attnres.attach or attnres.convert: a loop "
            "of your own is the plain one with DepthReads(..., None)"
        )
    before = [one.enabled for one in parts]
    try:
        for one in parts:
            one.enabled = False
        yield
    finally:
        for one, enabled in zip(parts, before, strict=True):
            one.enabled = enabled


def load_plain(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a checkpoint trained without depth reads into a module with them; the residual's parameters do not change.

    >>> import torch
    >>> from attnres.streams.attach import attach
    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)
    >>> state, residual = encoder.state_dict(), attach(encoder, "full")
    >>> load_plain(encoder, state)

    Args:
        state: as for `load_state_dict`.

    Raises:
        UserError: a parameter outside the residual is missing, or a tensor is left over. Then nothing is loaded.
    """
    inside = {path: one for path, one in module.named_modules() if isinstance(one, Residual)}
    reads = {f"{path}.{key}" if path else key for path, one in inside.items() for key in one.state_dict()}
    expected = set(module.state_dict())
    missing, extra = sorted(expected - reads - set(state)), sorted(set(state) - expected)
    if missing or extra:
        raise UserError(
            f"the checkpoint is not one of {type(module).__name__} without depth reads: it lacks {_some(missing)} and "
            f"has {_some(extra)} besides"
        )
    for one in inside.values():
        if isinstance(one, Uninitialised):
            one.init_parameters()
    module.load_state_dict(state, strict=False)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"
