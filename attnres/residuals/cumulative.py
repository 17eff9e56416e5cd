"""Depth reads over snapshots of a running stream: the layout of open-attention-residuals at its release."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnres.errors import UserError
from attnres.residuals.base import NormLike, whole
from attnres.residuals.block import DEFAULT_BLOCKS
from attnres.residuals.depth_attention import DepthAttention, DepthState


def snapshot_size(num_sublayers: int, block_size: int | None, num_blocks: int | None) -> int:
    """Sublayers from one snapshot to the next. `num_blocks` counts as that project does: whole transformer layers,
    ceil(layers / num_blocks) each, which may make fewer blocks than asked for."""
    if block_size is not None and num_blocks is not None:
        raise UserError(f"both block_size={block_size} and num_blocks={num_blocks} are given: give one of them")
    if block_size is not None:
        if whole("block_size", block_size) > num_sublayers:
            raise UserError(f"block_size is {block_size}: expected 1 to {num_sublayers} sublayers (a layer has two)")
        return block_size
    blocks = DEFAULT_BLOCKS if num_blocks is None else whole("num_blocks", num_blocks)
    return min(2 * math.ceil(num_sublayers / 2 / blocks), num_sublayers)


class Cumulative(DepthAttention):
    """Sources are the embedding, the stream as it was after every `block_size` sublayers, and the stream itself.

        x_0 = v_0,   x_l = x_{l-1} + f_l(h_l)          the stream is never reset
        h_l = sum_i a_i s_i,   s = [v_0, x_S, x_2S, .., x_{l-1}]

    The stream is a source at each read, so it counts twice at the first read and after each snapshot. There is no
    output read: the head gets norm(x_L). `block_size=1` is that project's Full. With zero queries this is *not* the
    standard residual: a large `recency_bias` or a closed gate brings it near (in gates, `stream` is x_{l-1}).

    Source: github.com/wdlctc/open-attention-residuals, release.
    """

    name = "cumulative"
    output_read = False
    carries = True

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        key_norm_eps: float = 1e-6,
        **gates: Any,
    ) -> None:
        size = snapshot_size(num_sublayers, block_size, num_blocks)
        super().__init__(
            num_sublayers,
            width,
            group=size,
            key_norm_eps=key_norm_eps,
            read_scale="mean",
            **gates,
        )
        self.block_size = size

    @property
    def max_open(self) -> int:
        return 1

    def opened(self, state: DepthState, output: Tensor) -> DepthState:
        return state._replace(added=(output,))

    def source_names(self, state: DepthState, index: int) -> Sequence[str]:
        return ["embedding", *(f"state {i * self.block_size}" for i in range(1, len(state.sealed))), "stream"]

    def expand(self, source: str, index: int, rows: Sequence[Tensor]) -> Tensor:
        if source == "stream":
            return self._span(0, index + 1)
        if source.startswith("state "):
            return self._span(0, int(source.split()[1]) + 1)
        return super().expand(source, index, rows)

    def hidden_state(self, state: DepthState) -> Tensor:
        return self._finished(state)[-1]

    def finish(self, state: DepthState, norm: NormLike) -> Tensor:
        stream = self.hidden_state(state)
        return self.normed(stream, self.num_sublayers, norm, sources=["stream"], values=[stream])
