"""Delta Attention Residuals: a depth read that is added to the running stream instead of replacing it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype, depth_read
from attnres.residuals.layout import About, Source, Traits, block_sources, outputs
from attnres.residuals.mechanisms.block import resolve_block_sizes
from attnres.residuals.queries import Queried
from attnres.residuals.settings import number, positive
from attnres.residuals.watch import NormLike


class Deltas(NamedTuple):
    """The running stream; the embedding and the sum of each finished block; the sum of the block in progress, if it has
    begun; all (..., d)."""

    stream: Tensor
    finished: tuple[Tensor, ...]
    partial: tuple[Tensor, ...] = ()


class DeltaAttnRes(Queried):
    """h_l = x_l + sum_i a_i v_i,  a = softmax_i( w_l . (g_l * v_i / rms(v_i)) ),  x_l = v_0 + .. + v_{l-1}; h_0 = v_0.

    v_i are the embedding and each sublayer's output. With `block_size` S above 1 (Delta Block) they are the embedding
    and the sum of each finished block of S sublayers; the block in progress is in x_l alone. There is no output read:
    the head's input is x_L. `query` w and `gain` g are (L, d).

    Start: w = 0, a mean. Over all outputs the mean is x_l / l, so the read is a multiple of x_l, and the network equals
    the standard residual. Over finished blocks it does not, since it omits the block in progress.

    `gate_start` multiplies the softmax term of read l by a learned number a_l with this start value; with 0 the network
    starts as the standard residual, in blocks too (as in hyper-connection-factory). None has no gate.

    The authors' code differs in two ways: queries start at random, and from the third block on it stores the stream
    minus the last stored difference, which is no block's sum. This class follows the paper.

    Source: Luo et al., "Delta Attention Residuals", arXiv 2605.18855; github.com/wdlctc/delta-attention-residuals-code.
    """

    name = "delta_attnres"
    traits = Traits(True, sums_to_one=False, has_query=True, starts_standard=True)
    slow = ("query", "gain")
    hands_on_sum = True
    about = About(
        "h_l = x_l + sum_i softmax_i(w_l . N(v_i)) v_i over outputs, or finished blocks' sums; x_l the running sum",
        "w = 0",
        "L/2 + 5; in blocks N/2 + 6",
        "Luo et al., arXiv 2605.18855",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        block_size: int | str | Sequence[int] | None = None,
        num_blocks: int | None = None,
        key_norm_eps: float = 1e-6,
        gate_start: float | None = None,
    ) -> None:
        super().__init__(num_sublayers, width)
        block_size = 1 if block_size is None and num_blocks is None else block_size
        sizes = resolve_block_sizes(num_sublayers, block_size, num_blocks)
        self.bounds = (0, *accumulate(sizes))
        self.key_norm_eps = positive("key_norm_eps", key_norm_eps)
        self.gate_start = None if gate_start is None else number("gate_start", gate_start)
        self.traits = self.traits._replace(starts_standard=max(sizes) == 1 or gate_start == 0)
        self.add_queries(num_sublayers)
        self.gate = None if gate_start is None else nn.Parameter(torch.empty(num_sublayers))
        self.init_parameters()

    def init_parameters(self) -> None:
        self.init_queries()
        if self.gate is not None and self.gate_start is not None:
            nn.init.constant_(self.gate, self.gate_start)

    def start(self, embedding: Tensor) -> Deltas:
        return Deltas(embedding, (embedding,))

    def read(self, state: Deltas, index: int, norm: NormLike) -> tuple[Tensor, Deltas]:
        h, finished = state.stream, state.finished
        values = finished + state.partial
        weights = None
        if self.watched:
            weights = h.new_ones(h[..., 0].numel(), len(values), dtype=compute_dtype(h.dtype))
        if 0 < index < self.num_sublayers:
            query, gain = self.queries[index], self.gains[index]
            added, shares = depth_read(finished, query, gain, eps=self.key_norm_eps, return_weights=True)
            if self.gate is not None:
                gate = self.gate[index].to(added.dtype)
                added, shares = gate * added, gate * shares
            h = h + added
            if weights is not None:
                weights[:, : len(finished)] += shares.reshape(len(finished), -1).t()
        return self.normed(h, index, norm, weights, values), state

    def write(self, state: Deltas, index: int, output: Tensor) -> Deltas:
        stream = state.stream + output
        partial = state.partial[0] + output if state.partial else output.to(stream.dtype)
        if index + 1 in self.bounds:
            return Deltas(stream, (*state.finished, partial))
        return Deltas(stream, state.finished, (partial,))

    def sources(self, read: int) -> tuple[Source, ...]:
        if len(self.bounds) > self.num_sublayers:  # blocks of one sublayer each
            return outputs(read + 1, self.sublayers)
        return block_sources(self.bounds, read)

    def direction(self, read: int) -> Tensor | None:
        return (self.queries[read] * self.gains[read]).detach() if 0 < read < self.num_sublayers else None

    def hidden_state(self, state: Deltas) -> Tensor:
        return state.stream
