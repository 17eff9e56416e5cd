"""Block Attention Residuals: sublayers read the sums of earlier blocks and the running sum of their own."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype
from attnres.residuals.layout import About, Learned, Source, block_sources
from attnres.residuals.mechanisms.depth_attention import DepthAttention, DepthState, sizes_of_groups
from attnres.residuals.program import BankReads
from attnres.residuals.settings import not_both, whole
from attnres.residuals.state import Slot

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


def _exponent(block_sum: Any) -> float | None:
    """Return gamma - 1 of setting `block_sum`; None where gamma is learned."""
    if block_sum in ("sum", "rms", "learned"):
        return {"sum": 0.0, "rms": -1.0, "learned": None}[block_sum]
    if isinstance(block_sum, int | float) and not isinstance(block_sum, bool) and 0 <= block_sum <= 1:
        return block_sum - 1.0
    raise UserError(f"block_sum is {block_sum!r}: expected sum, rms, learned, or gamma from 0 (rms) to 1 (sum)")


def _refuse_stream(block_sum: Any, options: dict[str, Any]) -> None:
    """Raise a UserError for settings that take the plain stream, which finished blocks are no longer the parts of."""
    for name, without in (("query", "static"), ("gate", "none"), ("alpha", "none")):
        if options.get(name, without) != without:
            raise UserError(
                f"{name}={options[name]} is given with block_sum={block_sum}: it takes the running sum of all outputs, "
                "which is in none of the sources then; give one of them"
            )


class Block(DepthAttention):
    """Sources are the embedding b_0, the sum of each finished block, and the running sum of the current one.

    The first sublayer of a block reads the finished blocks alone. `block_size=1` is Full; `block_size=L` is a standard
    residual with the embedding kept apart. Blocks may differ in size: [2, 2, 4], or "2+2+4", from the first on.

    `block_sum` says what a finished block is: b = sum_i y_i r_i^(gamma - 1) over its outputs y_i, where r_i is
    sqrt(mean(y_i^2) + eps). "sum" is gamma = 1, "rms" gamma = 0 (RMS Block: each output is normed), a number in between
    is that gamma, "learned" has one for each block, from 1. The block in progress is the plain sum in each of them, and
    the embedding is as it is. But for "sum" and "learned" this does not start as the standard residual.

    Source of "rms": github.com/kimmichtank/rms-block-attnres, which proposes gamma and reports no run of it.
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
        block_sum: str | float = "sum",
        **options: Any,
    ) -> None:
        self.exponent = _exponent(block_sum)
        if self.exponent != 0.0:
            _refuse_stream(block_sum, options)
            self.hands_on_sum = False
            self.traits = self.traits._replace(linear=False, starts_standard=self.exponent is None)
        super().__init__(
            num_sublayers,
            width,
            groups=resolve_block_sizes(num_sublayers, block_size, num_blocks),
            key_norm_eps=key_norm_eps,
            read_scale=read_scale,
            window=window,
            **options,
        )
        if self.exponent is None:
            self.gamma = nn.Parameter(torch.empty(len(self.bounds) - 1))
            nn.init.ones_(self.gamma)

    def init_parameters(self) -> None:
        super().init_parameters()
        if "gamma" in self._parameters:
            nn.init.ones_(self.gamma)

    @property
    def block_sizes(self) -> list[int]:
        """The sublayers of each block."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def max_open(self) -> int:
        return 1

    def opened(self, state: DepthState, output: Tensor) -> DepthState:
        if self.exponent != 0.0:
            state = state._replace(scaled=(self._scaled_sum(state, output),))
        return state._replace(added=(output,)) if state.open else state._replace(open=(output,))

    def _scaled_sum(self, state: DepthState, output: Tensor) -> Tensor:
        """Return sum_i y_i r_i^(gamma - 1) over the outputs of the block in progress, `output` (..., d) the last."""
        y, eps = output.to(compute_dtype(output.dtype)), self.key_norm_eps
        if self.exponent == -1.0:
            y = F.rms_norm(y, (self.width,), None, eps)
        else:
            block = len(state.sealed) - 1
            exponent = self.gamma[block].to(y.dtype) - 1.0 if self.exponent is None else self.exponent
            y = y * (y.square().mean(-1, keepdim=True) + eps) ** (exponent / 2)
        y = y.to(output.dtype)
        return state.scaled[0] + y if state.scaled else y.to(self._stream_dtype(state.sealed))

    def closed(self, state: DepthState, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return state.scaled or super().closed(state, dtype)

    def write(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        state = super().write(state, index, output)
        if index + 1 < self.num_sublayers or not state.scaled:
            return state
        return state._replace(open=state.scaled, added=(), scaled=())  # the head reads the last block as it has ended

    def slots(self, index: int) -> tuple[Slot, ...]:
        scaled = self.exponent != 0.0 and self._crossing(index)
        return (*super().slots(index), *([Slot(f"scaled {index}", False)] if scaled else []))

    def pack(self, state: DepthState, index: int) -> tuple[Tensor, ...]:
        return (*super().pack(state, index), *state.scaled)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> DepthState:
        if self.exponent == 0.0 or not self._crossing(index):
            return super().unpack(tensors, index)
        return super().unpack(tensors[:-1], index)._replace(scaled=(tensors[-1],))

    def bank_reads(self) -> BankReads | str:
        return super().bank_reads() if self.exponent == 0.0 else "a bank keeps plain sums, and block_sum is another"

    def learned(self) -> dict[str, Learned]:
        tables = super().learned()
        if self.exponent is None:
            tables["gamma"] = Learned(self.gamma.detach().float().cpu(), ("source",), "gamma of a block's sum")
        return tables

    def sealed(self, index: int) -> tuple[Source, ...]:
        return tuple(source for source in block_sources(self.bounds, index) if not source.open)

    def opens(self, index: int) -> tuple[Source, ...]:
        return tuple(source for source in block_sources(self.bounds, index) if source.open)
