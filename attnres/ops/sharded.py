"""Tensors that a kernel cannot read directly: results of pending collectives, and shards of a distributed tensor.

A kernel takes an address. An `AsyncCollectiveTensor`, which tensor and sequence parallelism pass to the next operation,
has none, and its result may not have arrived yet; a `DTensor` holds one rank's shard only.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError

PLAIN = (Tensor, nn.Parameter)
"""Types whose memory can be read directly; others (sharded, pending, fake) are handled by their own operations."""


def settled(tensor: Tensor) -> Tensor:
    """Return `tensor`, or, for the result of a pending collective, wait for it and return the plain tensor."""
    if type(tensor) in PLAIN or torch.compiler.is_compiling():
        return tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def refuse_sharded(values: Iterable[Any]) -> None:
    """Raise UserError for a DTensor among `values`: a read needs whole vectors and whole parameters."""
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is None or torch.compiler.is_compiling():
        return
    for value in values:
        if type(value) not in PLAIN and isinstance(value, sharded.DTensor):
            raise UserError(
                f"a depth read was given a DTensor of shape {tuple(value.shape)} with placements {value.placements}: "
                "reads need whole vectors and parameters, so leave the residual out of what is sharded "
                "(ignored_params of fully_shard), or hand over to_local() or full_tensor()"
            )
