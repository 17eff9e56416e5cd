"""Depth reads at block boundaries alone, whose mix becomes the stream: the layout of a nanoGPT study and its blog."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import Norm, apply_norm, compute_dtype, depth_read
from attnres.residuals.base import NormLike, Residual, full_precision, positive, whole
from attnres.residuals.block import DEFAULT_BLOCKS


class Boundaries(NamedTuple):
    """The plain stream, and the embedding with the states at the ends of finished blocks; all (..., d).

    At a boundary the stream is the last of those states, until the next read mixes them.
    """

    stream: Tensor
    ends: tuple[Tensor, ...]


class Boundary(Residual):
    """A plain residual inside a block; after block n a mix of all states at block ends becomes the stream.

        e_n = x,   x <- sum_{i <= n} a_i e_i,   a = softmax_i( w_n . (g_n * e_i / rms(e_i)) ),   e_0 = v_0

    A block's own end is among its sources, and the head's input is the last block's mix. `query` and `gain` are (N, d)
    for N blocks. `block_size` counts sublayers and must be even: blocks are whole layers; 2 is the study's Full.
    With zero queries this is not the standard residual, since the states hold one another.

    Source: github.com/aupadhyay/attnres-exp (GPT-2 124M on OpenWebText; key norm eps 1e-8).
    """

    name = "boundary"
    weighs = True
    feeds_back = True

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
        self.query = nn.Parameter(torch.empty(self.num_blocks, width))
        self.gain = nn.Parameter(torch.empty(self.num_blocks, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.gain)

    def mix(self, sources: tuple[Tensor, ...], block: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The stream after block `block`, the weights (sources, ...), and what they weigh."""
        query, gain = self.query[block], self.gain[block]
        h, weights = depth_read(sources, query, gain, eps=self.key_norm_eps, return_weights=True)
        return h, weights, sources

    def start(self, embedding: Tensor) -> Boundaries:
        return Boundaries(embedding, (embedding,))

    def read(self, state: Boundaries, index: int, norm: NormLike) -> tuple[Tensor, Boundaries]:
        if self._inside(index):
            names, values = ["stream"], [state.stream]
            return self.normed(state.stream, index, norm, None, names, values), state
        stream, weights, values = self.mix(state.ends, len(state.ends) - 2)
        if self.watched:
            names = ["embedding", *(f"block {i}" for i in range(1, len(state.ends)))]
            stream = self._watched(stream, index, weights.flatten(1).T, names, values)
        return apply_norm(stream, norm) if isinstance(norm, Norm) else norm(stream), Boundaries(stream, state.ends)

    def _inside(self, index: int) -> bool:
        """Whether read `index` is of the plain stream: no block ends before it."""
        return index == 0 or (index % self.block_size != 0 and index < self.num_sublayers)

    def write(self, state: Boundaries, index: int, output: Tensor) -> Boundaries:
        stream = state.stream + output
        if (index + 1) % self.block_size == 0 or index + 1 == self.num_sublayers:
            return Boundaries(stream, (*state.ends, stream))
        return Boundaries(stream, state.ends)

    @torch.no_grad()
    def direction(self, index: int) -> Tensor | None:
        if self._inside(index):
            return None
        block = math.ceil(index / self.block_size) - 1
        return self.query[block] * self.gain[block]

    def expand(self, source: str, index: int, rows: Sequence[Tensor]) -> Tensor:
        if source == "embedding":
            return self._span(0, 1)
        if source == "stream":
            start, stop = index - index % self.block_size, index
        else:
            stop = int(source.split()[1]) * self.block_size
            start, stop = stop - self.block_size, min(stop, self.num_sublayers)
        entered = rows[start] if start else self._span(0, 1)
        return entered + self._span(start + 1, stop + 1).to(entered)

    def hidden_state(self, state: Boundaries) -> Tensor:
        return state.stream

    def finish(self, state: Boundaries, norm: NormLike) -> Tensor:
        return self.read(state, self.num_sublayers, norm)[0]


class BoundaryNormed(Boundary):
    """As `boundary`, with the keys as values too and scaled logits:

        k_i = g_n * e_i / rms(e_i),   x <- sum_i a_i k_i,   a = softmax_i( w_n . k_i / sqrt(d) )

    Source: the snippet of the study's blog post (axu.sh/post/attention-residuals); its code does what `boundary` does.
    """

    name = "boundary_normed"

    def mix(self, sources: tuple[Tensor, ...], block: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        dtype = compute_dtype(sources[0].dtype)
        with full_precision(sources[0]):
            gain = self.gain[block].to(dtype)
            query = self.query[block].to(dtype) / self.width**0.5
            values = [source.to(dtype) for source in sources]
            keys = [v * (v.square().mean(-1, keepdim=True) + self.key_norm_eps).rsqrt() * gain for v in values]
            weights = torch.stack([key @ query for key in keys]).softmax(0)
            h = torch.stack([w.unsqueeze(-1) * key for w, key in zip(weights, keys, strict=True)]).sum(0)
        return h.to(sources[0].dtype), weights.detach(), keys

    def mixing_row(self, index: int, weights: Tensor, sources: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        return None  # the values are normed: a number for each channel


def _resolve(num_sublayers: int, block_size: int | None, num_blocks: int | None) -> int:
    """Sublayers per block: an even number, or all of them."""
    if block_size is not None and num_blocks is not None:
        raise UserError(f"both block_size={block_size} and num_blocks={num_blocks} are given: give one of them")
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
