"""Depth reads after blocks alone, over the paper's sources: one read a block instead of one a sublayer."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from attnres.residuals.base import NormLike, Slot, State
from attnres.residuals.layout import About, Source, block_sources
from attnres.residuals.mechanisms.boundary import Boundary


class Sums(NamedTuple):
    """The stream, the embedding with the sums of finished blocks, and that of the block in progress; all (..., d)."""

    stream: Tensor
    ends: tuple[Tensor, ...]
    partial: tuple[Tensor, ...] = ()


class PostBlock(Boundary):
    """A plain residual inside a block; after block n a read of the embedding b_0 and all blocks' sums is the stream.

        x <- (n+1) sum_{i <= n} a_i b_i,   a = softmax_i( w_n . (g_n * b_i / rms(b_i)) )

    As `boundary`, with sources that share no output, and scaled by their number: with zero queries this is the standard
    residual. `query` and `gain` are (N, d) for N blocks. `block_size` counts sublayers, whole layers.

    Source: the sources of arXiv 2603.15031 read where github.com/aupadhyay/attnres-exp reads.
    """

    name = "post_block"
    traits = Boundary.traits._replace(sums_to_one=False, starts_standard=True)
    about = About(
        "x + f(N x) inside a block; after it x = (n+1) sum_i softmax_i(w . N(b_i)) b_i over the blocks' sums",
        "w = 0",
        "5 + N/2S",
        "sources of arXiv 2603.15031, reads of github.com/aupadhyay/attnres-exp",
    )

    def mix(self, sources: tuple[Tensor, ...], block: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        h, weights, values = super().mix(sources, block)
        return h * len(sources), weights * len(sources), values

    def start(self, embedding: Tensor) -> State:
        return Sums(embedding, (embedding,))

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        x, after = super().read(state, index, norm)
        return x, Sums(after.stream, state.ends, state.partial)

    def write(self, state: State, index: int, output: Tensor) -> State:
        stream = state.stream + output
        partial = state.partial[0] + output if state.partial else output.to(stream.dtype)
        return Sums(stream, (*state.ends, partial)) if self._at_end(index + 1) else Sums(stream, state.ends, (partial,))

    def sources(self, index: int) -> tuple[Source, ...]:
        if self._inside(index):
            return super().sources(index)
        return block_sources((*range(0, self.num_sublayers, self.block_size), self.num_sublayers), index)

    def slots(self, index: int) -> tuple[Slot, ...]:
        slots = super().slots(index)
        return slots if self._at_end(index) else (*slots, Slot(f"partial {index}", False))

    def pack(self, state: State, index: int) -> tuple[Tensor, ...]:
        return state.ends if self._at_end(index) else (*state.ends, state.stream, *state.partial)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> State:
        ends = tuple(tensors[: self._ends(index)])
        return Sums(ends[-1], ends) if self._at_end(index) else Sums(tensors[-2], ends, (tensors[-1],))
