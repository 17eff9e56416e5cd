"""Depth reads for x-transformers: `add_depth_reads(model.attn_layers, "block", num_blocks=4)`.

Its layers are [norms, block, residual function]. The loop asks the residual function for a block's input
(`prepare`), and hands it the block's output: a read and a write. Between them goes the hidden state of
`attnres.DepthReads`.
"""

from typing import Any

from torch import Tensor, nn

import attnres


class DepthResidual(nn.Module):
    """Stands where a layer has its residual function."""

    def __init__(self, depth: attnres.DepthReads) -> None:
        super().__init__()
        self.depth = (depth,)  # a tuple, for the parameters belong to the list of layers

    def prepare(self, x: Any) -> tuple[Any, Any, dict[str, Any]]:
        state = self.depth[0].start(x) if isinstance(x, Tensor) else x
        return state.read(), state, {}

    def forward(self, output: Tensor, state: Any, **_: Any) -> Any:
        return state + output


class FinishedNorm:
    """Mixed into the class of the final norm, which keeps its parameters and their names."""

    def forward(self, state: Any, **condition: Any) -> Any:
        norm: Any = super()
        return state.finish(lambda h: norm.forward(h, **condition))


def add_depth_reads(layers: nn.Module, residual: str = "block", read_scale: str = "sum", **settings: Any) -> None:
    """Give an `Encoder` or `Decoder` with pre-norm layers depth reads, in place, as its part `depth`.

    Raises:
        attnres.UserError: layers of another kind: post-norm, or with a residual function of their own.
    """
    parts: Any = layers
    others = {type(layer[2]).__name__ for layer in parts.layers} - {"Residual"}
    if others or not parts.pre_norm:
        raise attnres.UserError(
            f"depth reads take the place of the residual of pre-norm layers: these have {sorted(others) or 'post-norm'}"
        )
    parts.depth = attnres.DepthReads(
        len(parts.layers), parts.dim, residual, sublayers=("sublayer",), read_scale=read_scale, **settings
    )
    for layer in parts.layers:
        layer[2] = DepthResidual(parts.depth)
    norm = parts.final_norm
    norm.__class__ = type(f"Finished{type(norm).__name__}", (FinishedNorm, type(norm)), {})
