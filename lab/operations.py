"""Arithmetic operations of a mechanism's reads and writes, counted while it makes them for a few tokens.

Counted are matrix products, as torch's own counter has them, and one operation for each value of every other kind of
arithmetic: an elementwise operation's result, what a sum or a softmax takes. Moving values is none.
"""

import functools
import json
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from attnres.ops import cpu, plain_torch
from attnres.ops.norms import Norm
from attnres.residuals.registry import make_residual

TOKENS = 16
_aten = torch.ops.aten
_MOVING = {_aten._to_copy, _aten.clone, _aten.copy_, _aten.copy, _aten.fill_, _aten.zero_}
_REDUCING = {
    *(_aten.sum, _aten.mean, _aten.amax, _aten.max, _aten.logsumexp, _aten._softmax, _aten._log_softmax),
    *(_aten.linalg_vector_norm, _aten.native_layer_norm, _aten.cumsum, _aten.prod, _aten.var),
}
_TWO = {_aten.addcmul, _aten.addcmul_, _aten.lerp, _aten.lerp_}


def operations(residual: str, settings: dict[str, Any], num_sublayers: int, width: int) -> float:
    """Return the operations of a forward pass for each token that a mechanism makes and the running sum does not.

    Args:
        residual: name of a mechanism; `settings` are its settings.

    Example: Full's read of n sources is n products with a query and a sum of n, 4 n d, and norms of the sources.
        >>> round(operations("full", {}, 24, 64) / 64 / sum(range(1, 26)), 1)
        4.8
    """
    key = json.dumps(settings, sort_keys=True)
    return max(0.0, _whole(residual, key, num_sublayers, width) - _whole("standard", "{}", num_sublayers, width))


@functools.cache
def _whole(residual: str, settings: str, num_sublayers: int, width: int) -> float:
    # On numbers: an operation on a shape alone takes eight times as long. Drawn weights leave the generator as it was.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), plain_torch(), cpu.switched(on=False):
        mechanism = make_residual(residual, num_sublayers, width, **json.loads(settings)).requires_grad_(False)
        norm, vector = Norm(torch.ones(width)), torch.ones(TOKENS, width)
        with _Counter() as counter:
            state = mechanism("start", vector)
            for index in range(num_sublayers):
                _, state = mechanism("read", state, index, norm)
                state = mechanism("write", state, index, vector.clone())
            mechanism("finish", state, norm)
    return counter.total / TOKENS


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = func._overloadpacket
        if kind in flop_registry:
            self.total += flop_registry[kind](*args, **kwargs, out_val=result)
        elif kind in (_aten.mv, _aten.dot):
            self.total += 2 * args[0].numel()
        elif kind in _REDUCING:
            self.total += _largest(args)
        elif torch.Tag.pointwise in func.tags and kind not in _MOVING:
            self.total += _largest(result) * (2 if kind in _TWO else 1)
        return result


def _largest(values: Any) -> int:
    return max((leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)), default=0)
