"""Block Attention Residuals: sublayers read the sums of earlier blocks and the running sum of their own."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from attnres.errors import UserError
from attnres.residuals.layout import About, Source, block_sources
from attnres.residuals.mechanisms.depth_attention import DepthAttention, DepthState, sizes_of_groups
from attnres.residuals.settings import not_both, whole

DEFAULT_BLOCKS = 8
"""About eight blocks recover most of Full's gain (arXiv 2603.15031, figure on block size)."""


def resolve_block_sizes(
    num_sublayers: int, block_size: int | str | Sequence[int] | None, num_blocks: int | None
) -> list[int]:
    """Return the sublayers of each block from either setting; sublayers are attention and MLP, not transformer layers.

    >>> resolve_block_sizes(10, 4, None), resolve_block_sizes(10, "2+2+6", None)
    ([4, 4, 2], [2, 2, 6])
    """
    not_both(block_size=block_size, num_blocks=num_blocks)
    if isinstance(block_size, str | Sequence):
        return _given_sizes(num_sublayers, block_size)
    for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
        if value is not None:
            whole(name, value)
    if block_size is not None:
        if block_size > num_sublayers:
            raise UserError(f"block_size is {block_size}: expected 1 to {num_sublayers} sublayers (a layer has two)")
        return sizes_of_groups(num_sublayers, block_size)
    if num_blocks is None:
        return sizes_of_groups(num_sublayers, math.ceil(num_sublayers / DEFAULT_BLOCKS))
    if num_blocks > num_sublayers:
        raise UserError(f"num_blocks is {num_blocks}: expected 1 to {num_sublayers}, the number of sublayers")
    size = math.ceil(num_sublayers / num_blocks)
    sizes = sizes_of_groups(num_sublayers, size)
    if len(sizes) != num_blocks:
        raise UserError(
            f"{num_sublayers} sublayers cannot be cut into num_blocks={num_blocks} blocks of one size (only the last "
            f"may be shorter): blocks of {size} make {len(sizes)}; choose another num_blocks or give block_size"
        )
    return sizes


def _given_sizes(num_sublayers: int, sizes: str | Sequence[int]) -> list[int]:
    parts = sizes.split("+") if isinstance(sizes, str) else sizes
    try:
        numbers = [whole("block_size", int(part) if isinstance(part, str) else part) for part in parts]
    except (ValueError, UserError):
        raise UserError(f"block_size is {sizes!r}: expected a whole number, or one for each block, as 2+2+4") from None
    if sum(numbers) != num_sublayers:
        raise UserError(f"the block sizes {sizes!r} add up to {sum(numbers)}: expected {num_sublayers}, all sublayers")
    return numbers


class Block(DepthAttention):
    """Sources are the embedding b_0, the sum of each finished block, and the running sum of the current one.

    The first sublayer of a block reads the finished blocks alone. `block_size=1` is Full; `block_size=L` is a standard
    residual with the embedding kept apart. Blocks may differ in size: [2, 2, 4], or "2+2+4", from the first on.
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
        block_size: int | str | Sequence[int] | None = None,
        num_blocks: int | None = None,
        key_norm_eps: float = 1e-6,
        read_scale="mean",
        window: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_sublayers,
            width,
            groups=resolve_block_sizes(num_sublayers, block_size, num_blocks),
            key_norm_eps=key_norm_eps,
            read_scale=read_scale,
            window=window,
            **options,
        )

    @property
    def block_sizes(self) -> list[int]:
        """The sublayers of each block."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def max_open(self) -> int:
        return 1

    def opened(self, state: DepthState, output: Tensor) -> DepthState:
        return state._replace(added=(output,)) if state.open else state._replace(open=(output,))

    def sealed(self, index: int) -> tuple[Source, ...]:
        return tuple(source for source in block_sources(self.bounds, index) if not source.open)

    def opens(self, index: int) -> tuple[Source, ...]:
        return tuple(source for source in block_sources(self.bounds, index) if source.open)
