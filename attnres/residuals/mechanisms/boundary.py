"""Depth reads only at block boundaries, whose result becomes the stream: three layouts of other projects."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops import compute_dtype, depth_read, full_precision, scaled_query
from attnres.ops.norms import one_over_rms
from attnres.residuals.layout import EMBEDDING, About, Source, Traits, block_sources
from attnres.residuals.mechanisms.block import DEFAULT_BLOCKS
from attnres.residuals.program import BankReads
from attnres.residuals.queries import Queried
from attnres.residuals.settings import not_both, positive, whole
from attnres.residuals.state import Slot, State
from attnres.residuals.watch import NormLike, watched, with_norm


class Boundaries(NamedTuple):
    """The plain stream, and the embedding with the states at the ends of finished blocks; all (..., d).

    At a boundary the stream is the last of those states until the next read replaces it by a mixture.
    """

    stream: Tensor
    ends: tuple[Tensor, ...]


class Boundary(Queried):
    """A plain residual inside a block; after block n a mix of all states at block ends becomes the stream.

        e_n = x,   x <- sum_{i <= n} a_i e_i,   a = softmax_i( w_n . (g_n * e_i / rms(e_i)) ),   e_0 = v_0

    A block's own end is among its sources, and the head's input is the last block's mix. `query` and `gain` are (N, d)
    for N blocks. `block_size` counts sublayers and must be even: blocks are whole layers; 2 is the study's Full.
    With zero queries this is not the standard residual, since the states hold one another.

    Source: github.com/aupadhyay/attnres-exp (GPT-2 124M on OpenWebText; key norm eps 1e-8).
    """

    name = "boundary"
    traits = Traits(True, sums_to_one=True, has_query=True, starts_standard=False)
    whole_layers = True
    slow = ("query", "gain")
    about = About(
        "x + f(N x) inside a block; after it x = sum_i softmax_i(w . N(e_i)) e_i over all states at block ends",
        "w = 0",
        "3 + N/2S",
        "github.com/aupadhyay/attnres-exp",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        key_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(num_sublayers, width)
        self.block_size = _resolve(num_sublayers, block_size, num_blocks)
        self.key_norm_eps = positive("key_norm_eps", key_norm_eps)
        self.num_blocks = math.ceil(num_sublayers / self.block_size)
        self.add_queries(self.num_blocks)
        Boundary.init_parameters(self)  # the parameters of a subclass do not exist yet

    def init_parameters(self) -> None:
        self.init_queries()

    def mix(self, sources: tuple[Tensor, ...], block: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Return the stream after block `block`, the weights (sources, ...), and what they weigh."""
        query, gain = self.queries[block], self.gains[block]
        h, weights = depth_read(sources, query, gain, eps=self.key_norm_eps, return_weights=True)
        return h, weights, sources

    def start(self, embedding: Tensor) -> State:
        return Boundaries(embedding, (embedding,))

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        if self._inside(index):
            return self.normed(state.stream, index, norm, values=[state.stream]), state
        stream, weights, values = self.mix(state.ends, len(state.ends) - 2)
        if self.watched:
            stream = watched(self, stream, index, weights.reshape(len(weights), -1).T, values)
        return with_norm(stream, norm), Boundaries(stream, self._kept(state.ends, stream))

    def _kept(self, ends: tuple[Tensor, ...], mix: Tensor) -> tuple[Tensor, ...]:
        """Return the states that later boundaries mix: for the finished block, its last state."""
        return ends

    def _inside(self, index: int) -> bool:
        """Return whether read `index` takes the plain stream: no block ends before it."""
        return index == 0 or not self._at_end(index)

    def write(self, state: State, index: int, output: Tensor) -> State:
        stream = state.stream + output
        return Boundaries(stream, (*state.ends, stream) if self._at_end(index + 1) else state.ends)

    def bank_reads(self) -> BankReads | str:
        reads = range(self.num_sublayers + 1)
        queries = [None if self._inside(index) else self._block(index) for index in reads]
        return BankReads([self.sources(index) for index in reads], queries, self.key_norm_eps)

    def bank_queries(self) -> Tensor:
        return scaled_query(self.queries, self.gains)

    @torch.no_grad()
    def direction(self, read: int) -> Tensor | None:
        if self._inside(read):
            return None
        block = self._block(read)
        return self.queries[block] * self.gains[block]

    def _block(self, index: int) -> int:
        """Return the number of the block that ends before read `index`, from 0."""
        return math.ceil(index / self.block_size) - 1

    def sources(self, read: int) -> tuple[Source, ...]:
        size = self.block_size
        if self._inside(read):
            return (self._since(read - read % size, read)._replace(kind="stream", number=None, open=True),)
        starts = range(0, read, size)
        return (EMBEDDING, *(self._since(start, min(start + size, read)) for start in starts))

    def _since(self, start: int, stop: int) -> Source:
        """Return the stream before sublayer `stop` as a source: the result of read `start`, the first of its block,
        plus the outputs since."""
        if start == 0:
            return Source("block", 1, range(stop + 1))
        return Source("block", start // self.block_size + 1, range(start + 1, stop + 1), after=start)

    def _at_end(self, index: int) -> bool:
        """Return whether the stream before sublayer `index` is the end of a block, or the embedding."""
        return index % self.block_size == 0 or index == self.num_sublayers

    def hidden_state(self, state: State) -> Tensor:
        return state.stream


class BoundaryNormed(Boundary):
    """As `boundary`, with the keys as values too, scaled logits, and mixes kept in place of the block ends:

        k_i = g_n * e_i / rms(e_i),   x <- sum_i a_i k_i,   a = softmax_i( w_n . k_i / sqrt(d) ),   e_n <- x

    So a boundary mixes the embedding, the mixes at the boundaries before it, and the state that its block ends with.

    Source: S. Mohan, "attention residuals", samitmohan.github.io, 18 March 2026, its Block snippet; its Full, which
    mixes before each layer and not at the end, is none of the layouts here.
    """

    name = "boundary_normed"
    about = About(
        "as boundary, the values are normed, and of a block that ended its mix is kept",
        "w = 0",
        "3 + N/2S",
        "samitmohan.github.io, 18 March 2026",
    )
    traits = Boundary.traits._replace(linear=False)  # values are normed by a gain, a number for each channel
    slow = ()

    def _kept(self, ends: tuple[Tensor, ...], mix: Tensor) -> tuple[Tensor, ...]:
        """Return the states that later boundaries mix: for the finished block, the mixture that became the stream."""
        return (*ends[:-1], mix)

    def sources(self, read: int) -> tuple[Source, ...]:
        if self._inside(read):
            return super().sources(read)
        embedding, *past, last = super().sources(read)
        ends = [one.span.stop - 1 for one in past if one.span]
        mixes = [one._replace(span=range(end + 1, end + 1), after=end) for one, end in zip(past, ends, strict=True)]
        return (embedding, *mixes, last)

    def mix(self, sources: tuple[Tensor, ...], block: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        dtype = compute_dtype(sources[0].dtype)
        with full_precision(sources[0]):
            gain = self.gains[block].to(dtype)
            query = self.query[block].to(dtype) / self.width**0.5
            values = [source.to(dtype) for source in sources]
            keys = [v * one_over_rms(v, self.key_norm_eps) * gain for v in values]
            weights = torch.stack([key @ query for key in keys]).softmax(0)
            h = torch.stack([w.unsqueeze(-1) * key for w, key in zip(weights, keys, strict=True)]).sum(0)
        return h.to(sources[0].dtype), weights.detach(), keys

    @torch.no_grad()
    def direction(self, read: int) -> Tensor | None:
        # the keys, with their gain, are the values
        return None if self._inside(read) else self.query[self._block(read)]

    def sharpness(self, read: int) -> float | None:
        """Return |w * g|, since the logits are divided by sqrt(d)."""
        if self._inside(read):
            return None
        block = self._block(read)
        return float((self.query[block] * self.gains[block]).detach().double().norm())


def _resolve(num_sublayers: int, block_size: int | None, num_blocks: int | None) -> int:
    """Return the sublayers of a block: an even number, or all of them."""
    not_both(block_size=block_size, num_blocks=num_blocks)
    if block_size is not None:
        if whole("block_size", block_size) % 2 or block_size > num_sublayers:
            raise UserError(
                f"block_size is {block_size}: expected an even number of sublayers (whole layers) up to {num_sublayers}"
            )
        return block_size
    layers = math.ceil(num_sublayers / 2)
    if num_blocks is not None and layers % whole("num_blocks", num_blocks):
        raise UserError(f"num_blocks is {num_blocks}: expected a number that divides the {layers} layers")
    return 2 * math.ceil(layers / (num_blocks or DEFAULT_BLOCKS))


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

    def sources(self, read: int) -> tuple[Source, ...]:
        if self._inside(read):
            return super().sources(read)
        return block_sources((*range(0, self.num_sublayers, self.block_size), self.num_sublayers), read)

    def slots(self, index: int) -> tuple[Slot, ...]:
        stream, *others = super().slots(index)
        return tuple(others) if self._mixes_next(index) else (stream, *others)

    def pack(self, state: State, index: int) -> tuple[Tensor, ...]:
        stream, *others = super().pack(state, index)
        return tuple(others) if self._mixes_next(index) else (stream, *others)

    def unpack(self, tensors: Sequence[Tensor], index: int) -> State:
        return super().unpack((tensors[-1], *tensors) if self._mixes_next(index) else tensors, index)

    def _mixes_next(self, index: int) -> bool:
        """Return whether the next read replaces the stream, so that the present stream need not cross a cut."""
        return index > 0 and self._at_end(index)
