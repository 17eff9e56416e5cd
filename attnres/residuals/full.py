"""Full Attention Residuals: every sublayer reads every earlier output."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnres.residuals.base import output_names, whole
from attnres.residuals.depth_attention import DepthAttention, DepthState


class Full(DepthAttention):
    """Sources are the embedding and each sublayer's output. Memory grows linearly with depth, reads with its square.

    Scheduled in groups of about sqrt(L) sublayers, which share one pass over the sources sealed before the group; the
    group's own outputs stay separate sources. The grouping changes speed, never the result.
    """

    name = "full"

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        group: int | None = None,
        key_norm_eps: float = 1e-6,
        read_scale="mean",
        **gates: Any,
    ) -> None:
        group = max(1, round(math.sqrt(num_sublayers))) if group is None else whole("group", group)
        super().__init__(
            num_sublayers,
            width,
            group=group,
            key_norm_eps=key_norm_eps,
            read_scale=read_scale,
            **gates,
        )

    def opened(self, state: DepthState, output: Tensor) -> DepthState:
        return state._replace(open=(*state.open, output))

    def source_names(self, state: DepthState, index: int) -> Sequence[str]:
        return output_names(index + 1)
