"""Full Attention Residuals: every sublayer reads every earlier output."""

import math
from typing import Any

from torch import Tensor

from attnres.residuals.layout import About, Source, outputs
from attnres.residuals.mechanisms.depth_attention import DepthAttention, DepthState, sizes_of_groups
from attnres.residuals.settings import whole
from attnres.residuals.state import Slot, slots_of


class Full(DepthAttention):
    """Sources are the embedding and each sublayer's output. Memory grows linearly with depth, reads with its square.

    Reads are scheduled in groups of about sqrt(L) sublayers, which share one pass over the sources sealed before the
    group; the group's outputs stay separate sources. The grouping changes speed, never the result.
    """

    name = "full"
    traits = DepthAttention.traits._replace(colour="#d55e00")
    about = About(
        "h_l = sum_i softmax_i(w_l . N(v_i)) v_i over the embedding and every output",
        "w = 0",
        "about L",
        "Kimi Team, arXiv 2603.15031",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        group: int | None = None,
        key_norm_eps: float = 1e-6,
        read_scale="mean",
        window: int | None = None,
        **options: Any,
    ) -> None:
        group = max(1, round(math.sqrt(num_sublayers))) if group is None else whole("group", group)
        super().__init__(
            num_sublayers,
            width,
            groups=sizes_of_groups(num_sublayers, group),
            key_norm_eps=key_norm_eps,
            read_scale=read_scale,
            window=window,
            **options,
        )

    def opened(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        return state._replace(open=(*state.open, output))

    def sealed(self, read: int) -> tuple[Source, ...]:
        return outputs(self.group_start(read) + 1, self.sublayers)

    def opens(self, read: int) -> tuple[Source, ...]:
        return outputs(read + 1, self.sublayers)[self.group_start(read) + 1 :]

    def slots(self, index: int) -> tuple[Slot, ...]:
        return slots_of(self._all_sources(index), index)  # outputs of the group never change either
