"""Block Attention Residuals: sublayers read the sums of earlier blocks and the running sum of their own block."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype
from attnres.residuals.layout import EMBEDDING, About, Learned, Source
from attnres.residuals.mechanisms.depth_attention import NULL, DepthAttention, DepthState, sizes_of_groups
from attnres.residuals.program import BankReads
from attnres.residuals.settings import not_both, number, one_of, start_at, true_or_false, whole
from attnres.residuals.state import Slot

DEFAULT_BLOCKS = 8
"""About eight blocks recover most of Full's gain (arXiv 2603.15031, figure on block size)."""


def resolve_block_sizes(
    num_sublayers: int, block_size: int | str | Sequence[int] | None, num_blocks: int | None
) -> list[int]:
    """Return the number of sublayers of each block from either setting; sublayers are attention and MLP, not whole
    layers.

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
            f"{num_sublayers} sublayers cannot be divided into num_blocks={num_blocks} blocks of one size (only the "
            "last "
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
    """Return gamma - 1 for setting `block_sum`; None if gamma is learned."""
    if block_sum in ("sum", "rms", "learned"):
        return {"sum": 0.0, "rms": -1.0, "learned": None}[block_sum]
    if isinstance(block_sum, int | float) and not isinstance(block_sum, bool) and 0 <= block_sum <= 1:
        return block_sum - 1.0
    raise UserError(f"block_sum is {block_sum!r}: expected sum, rms, learned, or gamma from 0 (rms) to 1 (sum)")


def _refuse_stream(altered: str, options: dict[str, Any]) -> None:
    """Raise a UserError for settings that use the plain stream, if finished blocks no longer sum to it."""
    for name, without in (("query", "static"), ("gate", "none"), ("alpha", "none")):
        if options.get(name, without) != without:
            raise UserError(
                f"{name}={options[name]} is given with {altered}: it uses the running sum of all outputs, to which "
                "the sources then do not sum; give one of them"
            )


class Block(DepthAttention):
    """Sources are the embedding b_0, the sum of each finished block, and the running sum of the current one.

    The first sublayer of a block reads only the finished blocks. `block_size=1` is Full; `block_size=L` is a standard
    residual with the embedding as a separate source. Blocks may differ in size: [2, 2, 4], or "2+2+4", in order.

    `block_sum` defines the value of a finished block: b = sum_i y_i r_i^(gamma - 1) over its outputs y_i, where r_i is
    sqrt(mean(y_i^2) + eps). "sum" is gamma = 1, "rms" gamma = 0 (RMS Block: each output is normed), a number in between
    is gamma itself, "learned" has one for each block, starting at 1. The block in progress is always the plain sum, and
    the embedding is unchanged. Only "sum" and "learned" start as the standard residual.

    `summaries` "split" has two sums in a block, of its attentions and of its MLPs, each a source from its first output
    on: twice as many sources, and with blocks of one layer those of Full.

    A source that sums c outputs (the embedding: 1, a block in progress: those so far) has

        value  s S,  s = c^-alpha, alpha = `count_power`;    logit + beta log c,  beta = `count_prior`

    With `block_scale` s is a learned number for each sublayer, starting at c^-alpha; a sum uses that of its last
    sublayer. beta may be "learned": one for each read, starting at alpha. With queries at 0 a read is sum_j c_j^(beta -
    alpha) S_j over sum_j c_j^beta: the standard residual where alpha = beta, a mean of the blocks' means with 1 and 0.

    Source of "rms": github.com/kimmichtank/rms-block-attnres, which proposes gamma and reports no run of it; of the
    other settings github.com/jon123boss/LR-AttnRes, which reports none of them alone.
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
        summaries: Literal["whole", "split"] = "whole",
        count_power: float = 0.0,
        count_prior: float | Literal["learned"] = 0.0,
        block_scale: bool = False,
        **options: Any,
    ) -> None:
        self.exponent, self.count_power = _exponent(block_sum), number("count_power", count_power)
        learns_prior = count_prior == "learned"
        self.count_prior = self.count_power if learns_prior else number("count_prior", count_prior)
        self.scales = true_or_false("block_scale", block_scale) or self.count_power != 0.0
        self.kinds = len(self.sublayers) if one_of("summaries", summaries, ("whole", "split")) == "split" else 1
        """How many sums a block has: output i is added to the sum of the output that many before it."""
        scaled = f"block_scale={block_scale}" if block_scale else f"count_power={count_power}"
        if self.exponent != 0.0 and self.scales:
            raise UserError(f"{scaled} is given with block_sum={block_sum}: each sets the size of a block; give one")
        self.altered = f"block_sum={block_sum}" if self.exponent != 0.0 else scaled if self.scales else None
        """The setting that makes sources other than plain sums, in words."""
        if self.altered is not None:
            _refuse_stream(self.altered, options)
            self.hands_on_sum = False
            self.traits = self.traits._replace(linear=False)
        sizes = resolve_block_sizes(num_sublayers, block_size, num_blocks)
        alike = self.count_power == self.count_prior or max(sizes) <= self.kinds  # or every sum has one output
        standard = self.exponent in (None, 0.0) and alike
        self.traits = self.traits._replace(starts_standard=standard)
        super().__init__(
            num_sublayers,
            width,
            groups=sizes,
            key_norm_eps=key_norm_eps,
            read_scale=read_scale,
            window=window,
            **options,
        )
        if self.weighting.sigmoid and (self.count_prior or learns_prior):
            raise UserError(
                f"count_prior={count_prior} is given with weights=sigmoid, which weighs each source separately"
            )
        self.gamma = nn.Parameter(torch.empty(len(self.bounds) - 1)) if self.exponent is None else None
        self.scale = nn.Parameter(torch.empty(num_sublayers)) if block_scale else None
        self.prior = nn.Parameter(torch.empty(num_sublayers + 1)) if learns_prior else None
        if self.count_prior or learns_prior:
            word = f"count_prior={count_prior}"
            self.special = word if self.special is None else f"{self.special}, {word}"
            self.heeds_recompute = False
        self._init_sums()

    def init_parameters(self) -> None:
        super().init_parameters()
        if hasattr(self, "prior"):  # the base class's constructor calls this first
            self._init_sums()

    def _init_sums(self) -> None:
        if self.gamma is not None:
            nn.init.ones_(self.gamma)
        if self.scale is not None:
            counts = torch.tensor([float(self._count(index)) for index in range(self.num_sublayers)])
            start_at(self.scale, counts**-self.count_power)
        if self.prior is not None:
            nn.init.constant_(self.prior, self.count_power)

    def _count(self, index: int) -> int:
        """Return the number of outputs in the sum that sublayer `index` has added to."""
        return (index - self.group_start(index)) // self.kinds + 1

    @property
    def block_sizes(self) -> list[int]:
        """Return the number of sublayers of each block."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    def _most_open(self) -> int:
        return min(self.kinds, max(self.block_sizes))

    def opened(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        sealed, opens, added, reads, scaled, shared = state
        begun = len(opens) == self.kinds
        if self.altered is not None:
            scaled = self._scaled(state, index, output, begun=begun)
        if self.scales:
            scale = self._count(index) ** -self.count_power if self.scale is None else self.scale[index]
            opens = (*opens[begun:], scaled[-1] * scale)
        elif begun:
            opens, added = (*opens[1:], opens[0]), (output,)  # the growing sum is the last source
        else:
            opens = (*opens, output)
        if scaled and index + 1 == self.num_sublayers:  # the head reads the last block as finished
            state = DepthState(sealed, opens, added, reads, scaled, shared)
            opens, added, scaled = self.closed(state, self._stream_dtype(sealed)), (), ()
        return DepthState(sealed, opens, added, reads, scaled, shared)

    def _scaled(self, state: DepthState, index: int, output: Tensor, *, begun: bool) -> tuple[Tensor, ...]:
        """Return `DepthState.scaled` with an output added, to the first of its sums if that has `begun`."""
        y = output if self.scales else self._sized(output, self.bounds.index(self.group_start(index)))
        total = state.scaled[0] + y if begun else y.to(self._stream_dtype(state.sealed))
        return (*state.scaled[begun:], total)

    def _sized(self, output: Tensor, group: int) -> Tensor:
        """Return y r^(gamma - 1) of an output y (..., d) in block number `group`."""
        y, eps = output.to(compute_dtype(output.dtype)), self.key_norm_eps
        if self.exponent == -1.0:
            return F.rms_norm(y, (self.width,), None, eps).to(output.dtype)
        exponent = self.gamma[group].to(y.dtype) - 1.0 if self.gamma is not None else self.exponent or 0.0
        return (y * (y.square().mean(-1, keepdim=True) + eps) ** (exponent / 2)).to(output.dtype)

    def closed(self, state: DepthState, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return state.scaled if state.scaled and not self.scales else super().closed(state, dtype)

    def slots(self, index: int) -> tuple[Slot, ...]:
        scaled = self._crossing(index) if self.altered is not None else ()
        return (*super().slots(index), *(Slot(f"scaled {place}.{index}", False) for place in range(len(scaled))))

    def pack(self, state: DepthState, index: int) -> tuple[Tensor, ...]:
        return (*super().pack(state, index), *state.scaled)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> DepthState:
        count = len(tensors) - (len(self._crossing(index)) if self.altered is not None else 0)
        return super().unpack(tensors[:count], index)._replace(scaled=tuple(tensors[count:]))

    def bank_reads(self) -> BankReads | str:
        return super().bank_reads() if self.altered is None else f"a bank keeps plain sums, and not with {self.altered}"

    def prior_logits(self, read: int) -> list[Tensor | float]:
        beta = self.count_prior if self.prior is None else self.prior[read]
        return [] if self.prior is None and not beta else [beta * math.log(count) for count in self._counts(read)]

    def _counts(self, read: int) -> list[int]:
        """Return the number of outputs in each source of read number `read`, except a null source."""
        return [len(source.span or ()) for source in self.sources(read) if source is not NULL]

    def total(self, read: int) -> float:
        if not self.count_prior:
            return super().total(read)
        return sum(count**self.count_prior for count in self._counts(read)) + self.weighting.null_source

    def handed_on(self, state: DepthState) -> Tensor:
        if not self.scales:
            return super().handed_on(state)
        values = zip(self.sealed(self.num_sublayers), state.sealed + state.open, strict=True)
        return sum(value * len(source.span or ()) ** self.count_power for source, value in values)

    def learned(self) -> dict[str, Learned]:
        tables = super().learned()
        titles = {"gamma": "gamma of a block's sum", "scale": "factor of a sum", "prior": "beta of log c"}
        axes = {"gamma": "source", "scale": "sublayer", "prior": "read"}
        for name, title in titles.items():
            parameter = getattr(self, name)
            if parameter is not None:
                tables[name] = Learned(parameter.detach().float().cpu(), (axes[name],), title)
        return tables

    def sealed(self, read: int) -> tuple[Source, ...]:
        ended = pairwise(bound for bound in self.bounds if bound <= read)
        blocks = ((number, bounds) for number, bounds in enumerate(ended, 1))
        return (EMBEDDING, *(source for number, bounds in blocks for source in self._sums(*bounds, number)))

    def opens(self, read: int) -> tuple[Source, ...]:
        return self._sums(max(bound for bound in self.bounds if bound <= read), read, None)

    def _sums(self, start: int, stop: int, number: int | None) -> tuple[Source, ...]:
        """Return the sums of the outputs of sublayers `start` to `stop` - 1, the one with the latest output last.

        Args:
            number: number of their block; None while it is in progress.
        """
        sources, opens, step = [], number is None, self.kinds
        for last in range(max(start, stop - step), stop):
            first = last - (last - start) // step * step
            kind = "partial" if opens else "block"
            if step > 1:
                word = self.sublayers[last % step]
                kind = f"partial_{word}" if opens else f"{word}_sum"
            sources.append(Source(kind, number, range(first + 1, last + 2, step), opens))
        return tuple(sources)
