"""Block Attention Residuals: sublayers read the sums of earlier blocks and the running sum of their own."""

import math
from typing import Any

from torch import Tensor

from attnres.errors import UserError
from attnres.residuals.layout import EMBEDDING, About, Source
from attnres.residuals.mechanisms.depth_attention import DepthAttention, DepthState
from attnres.residuals.settings import not_both, whole

DEFAULT_BLOCKS = 8
"""About eight blocks recover most of Full's gain (arXiv 2603.15031, figure on block size)."""


def resolve_block_size(num_sublayers: int, block_size: int | None, num_blocks: int | None) -> int:
    """Sublayers per block from either setting; both count sublayers (attention and MLP), not transformer layers."""
    not_both(block_size=block_size, num_blocks=num_blocks)
    for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
        if value is not None:
            whole(name, value)
    if block_size is not None:
        if block_size > num_sublayers:
            raise UserError(f"block_size is {block_size}: expected 1 to {num_sublayers} sublayers (a layer has two)")
        return block_size
    if num_blocks is None:
        return math.ceil(num_sublayers / DEFAULT_BLOCKS)
    if num_blocks > num_sublayers:
        raise UserError(f"num_blocks is {num_blocks}: expected 1 to {num_sublayers}, the number of sublayers")
    size = math.ceil(num_sublayers / num_blocks)
    blocks = math.ceil(num_sublayers / size)
    if blocks != num_blocks:
        raise UserError(
            f"{num_sublayers} sublayers cannot be cut into num_blocks={num_blocks} blocks of one size (only the last "
            f"may be shorter): blocks of {size} make {blocks}; choose another num_blocks or give block_size"
        )
    return size


class Block(DepthAttention):
    """Sources are the embedding b_0, the sum of each finished block, and the running sum of the current one.

    The first sublayer of a block reads the finished blocks alone. `block_size=1` is Full; `block_size=L` is a standard
    residual with the embedding kept apart.
    """

    name = "block"
    traits = DepthAttention.traits._replace(colour="#0072b2")
    about = About(
        "as full, over the embedding, finished blocks' sums and the block in progress",
        "w = 0",
        "about N/S + 5",
        "Kimi Team, arXiv 2603.15031",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        key_norm_eps: float = 1e-6,
        read_scale="mean",
        **gates: Any,
    ) -> None:
        size = resolve_block_size(num_sublayers, block_size, num_blocks)
        super().__init__(
            num_sublayers,
            width,
            group=size,
            key_norm_eps=key_norm_eps,
            read_scale=read_scale,
            **gates,
        )
        self.block_size = size

    @property
    def max_open(self) -> int:
        return 1

    def opened(self, state: DepthState, output: Tensor) -> DepthState:
        return state._replace(added=(output,)) if state.open else state._replace(open=(output,))

    def sealed(self, index: int) -> tuple[Source, ...]:
        size, last = self.block_size, self.num_sublayers
        spans = (range(start + 1, min(start + size, last) + 1) for start in range(0, self.group_start(index), size))
        return (EMBEDDING, *(Source("block", number, span) for number, span in enumerate(spans, 1)))

    def opens(self, index: int) -> tuple[Source, ...]:
        start = self.group_start(index)
        return () if index == start else (Source("partial", None, range(start + 1, index + 1), open=True),)
