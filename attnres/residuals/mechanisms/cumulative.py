"""Depth reads over snapshots of a running stream: the layout of open-attention-residuals at its release."""

import math
from typing import Any

from torch import Tensor

from attnres.errors import UserError
from attnres.residuals.layout import EMBEDDING, About, Source
from attnres.residuals.mechanisms.block import DEFAULT_BLOCKS
from attnres.residuals.mechanisms.depth_attention import DepthAttention, DepthState, sizes_of_groups
from attnres.residuals.program import BankReads
from attnres.residuals.settings import not_both, whole
from attnres.residuals.watch import NormLike


def snapshot_size(num_sublayers: int, block_size: int | None, num_blocks: int | None, kinds: int) -> int:
    """Return the sublayers between two snapshots. `num_blocks` counts as that project does: whole transformer layers,
    of `kinds` sublayers, ceil(layers / num_blocks) each, which may give fewer blocks than asked for."""
    not_both(block_size=block_size, num_blocks=num_blocks)
    if block_size is not None:
        if whole("block_size", block_size) > num_sublayers:
            raise UserError(f"block_size is {block_size}: expected 1 to {num_sublayers} sublayers (a layer has two)")
        return block_size
    blocks = DEFAULT_BLOCKS if num_blocks is None else whole("num_blocks", num_blocks)
    return min(kinds * math.ceil(num_sublayers / kinds / blocks), num_sublayers)


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
    traits = DepthAttention.traits._replace(starts_standard=False)
    about = About(
        "as block, over snapshots of the running sum and the running sum",
        "w = 0",
        "about N/S + 5",
        "open-attention-residuals",
    )
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
        **options: Any,
    ) -> None:
        size = snapshot_size(num_sublayers, block_size, num_blocks, len(self.sublayers))
        super().__init__(
            num_sublayers,
            width,
            groups=sizes_of_groups(num_sublayers, size),
            key_norm_eps=key_norm_eps,
            read_scale="mean",
            **options,
        )
        self.block_size = size

    def _most_open(self) -> int:
        return 1

    def opened(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        return state._replace(added=(output,))

    def sealed(self, read: int) -> tuple[Source, ...]:
        ends = range(self.block_size, read + 1, self.block_size)
        snapshots = [Source("state", end, range(end + 1)) for end in ends]
        if read == self.num_sublayers and read % self.block_size:
            snapshots.append(Source("state", read, range(read + 1)))  # the head reads the stream, which ends here
        return (EMBEDDING, *snapshots)

    def opens(self, read: int) -> tuple[Source, ...]:
        return (Source("stream", None, range(read + 1), open=True),)

    def sources(self, read: int) -> tuple[Source, ...]:
        return self.opens(read) if read == self.num_sublayers else super().sources(read)

    def bank_reads(self) -> BankReads | str:
        """Return the bank reads; overridden because `finish` is overridden: the head reads one source, the stream."""
        return super().bank_reads()

    def hidden_state(self, state: DepthState) -> Tensor:
        return self._finished(state)[-1]

    def finish(self, state: DepthState, norm: NormLike) -> Tensor:
        stream = self.hidden_state(state)
        return self.normed(stream, self.num_sublayers, norm, values=[stream])
