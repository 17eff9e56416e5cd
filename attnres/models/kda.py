"""Models with depth reads compute KDA layers on tiles (`attnres.ops.kda`), in place of Transformers' PyTorch code.

Plain models in the same process keep that code: their layers do not ask for tiles.
"""

import functools
import importlib.util
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from attnres.ops import plain
from attnres.ops.kda import kda
from attnres.streams.known_norms import Exchanged, exchange, own_class

_FUNCTION = "chunk_kimi_delta_attention"
"""As each of Transformers' files with KDA layers calls it: kimi_linear, bailing_hybrid, glm5_next."""


class _OnTiles(Exchanged):
    """Mixed into the class of a KDA layer: asks the function of its file for tiles."""

    renames = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        layer_class: Any = next(base for base in cls.__mro__ if not issubclass(base, Exchanged))
        names = unwrap(layer_class.forward).__globals__
        if not hasattr(names[_FUNCTION], "without_tiles"):
            names[_FUNCTION] = _choosing(names[_FUNCTION])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, tiles=True, **kwargs)


def use_tiles(model: nn.Module) -> None:
    """Let every KDA layer of a model be computed on tiles."""
    for module in model.modules():
        code = getattr(unwrap(own_class(module).forward), "__code__", None)
        if code is not None and _FUNCTION in code.co_names:
            exchange(module, _OnTiles)


def _choosing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return Transformers' function with a further keyword, `tiles`."""
    has_fla = importlib.util.find_spec("fla") is not None

    @functools.wraps(theirs)
    def chosen(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, tiles: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        # `theirs` is FLA's kernel, for CUDA, if FLA is installed. The tiles need the values of the decays, which a CUDA
        # graph and an export do not have. Packed sequences need FLA: without it `theirs` raises an error.
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
        packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        if not tiles or packed or captured or (query.is_cuda and has_fla) or plain.is_needed():
            return theirs(query, key, value, g=g, beta=beta, **kwargs)
        output, state = kda(query, key, value, g, beta, kwargs.get("initial_state"))
        return output, state if kwargs.get("output_final_state") else None

    chosen.without_tiles = theirs  # ty: ignore[missing-attribute]
    return chosen
