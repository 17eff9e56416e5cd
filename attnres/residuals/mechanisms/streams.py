"""What mechanisms of several parallel streams share: the state, reads and writes, and what streams are made of."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import Residual
from attnres.residuals.settings import whole
from attnres.residuals.watch import NormLike, looking


class Streams(NamedTuple):
    """The n streams (..., n, d), and after a read how much of the coming output each receives: one tensor (..., n)."""

    streams: Tensor
    beta: tuple[Tensor, ...] = ()


class ParallelStreams(Residual):
    """x = norm(alpha_0^T H),  H' = A^T H + beta (outer) f(x), over n streams H (n, d).

    A subclass says [alpha_0, A] and beta of each sublayer by `connections`. The embedding is repeated to all streams at
    the start; the head reads their sum.
    """

    watched_from_start = True

    def __init__(self, num_sublayers: int, width: int, num_streams: int) -> None:
        super().__init__(num_sublayers, width)
        self.num_streams = whole("num_streams", num_streams)
        self._made_of: dict[int, Tensor] = {}

    def connections(self, streams: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return what sublayer `index` reads and writes.

        Args:
            streams: (..., n, d) in the compute dtype, as are the results.

        Returns:
            [alpha_0, A], (n, n+1): column 0 is the share of each stream in the read, column j+1 that in the new stream
            j; or alpha_0 alone, (n, 1), where A is the identity. beta, (n,): the share of the output for each stream.
            Both may have the tokens' axes before these.
        """
        raise NotImplementedError

    def merged(self, streams: Tensor) -> Tensor:
        """Return what the head reads of n streams (..., n, d)."""
        return streams.sum(-2)

    def handed_on(self, state: Streams) -> Tensor:
        return self.merged(state.streams) / self.num_streams

    def forget(self) -> None:
        self._made_of = {}

    def start(self, embedding: Tensor) -> Streams:
        shape = (*embedding.shape[:-1], self.num_streams)
        self._made_of = {0: embedding.new_ones(*shape, 1)} if self.watched else {}
        return Streams(embedding.unsqueeze(-2).expand(*shape, self.width))

    def read(self, state: Streams, index: int, norm: NormLike) -> tuple[Tensor, Streams]:
        streams = state.streams.to(compute_dtype(state.streams.dtype))
        with full_precision(streams):
            alpha, beta = self.connections(streams, index)
            mixed = (alpha.transpose(-1, -2) @ streams).to(state.streams.dtype)
            beta = beta.to(state.streams.dtype)
        weights = self._follow(index, alpha, beta) if self.watched else None
        h, carried = mixed, state.streams
        if alpha.shape[-1] > 1:
            h, carried = mixed.split((1, self.num_streams), -2)
        return self.normed(h.squeeze(-2), index, norm, weights), Streams(carried, (beta,))

    def _follow(self, index: int, alpha: Tensor, beta: Tensor) -> Tensor:
        """Return what read `index` is made of, (tokens, index + 1), and keep what the streams (..., n, outputs) will be
        sums of after its write. Kept beside the state and by index: looking changes no state, and a layer that runs
        again finds what it found."""
        with looking(self):
            outputs = self._made_of[index].to(alpha)
            mixed = alpha.transpose(-1, -2) @ outputs
            kept = mixed[..., 1:, :] if alpha.shape[-1] > 1 else outputs
            newest = beta.to(alpha).unsqueeze(-1).expand(*kept.shape[:-1], 1)
            self._made_of[index + 1] = torch.cat([kept, newest], -1)
            return mixed[..., 0, :].reshape(-1, index + 1)

    def write(self, state: Streams, index: int, output: Tensor) -> Streams:
        (beta,) = state.beta  # a write follows its read
        return Streams(torch.addcmul(state.streams, beta.unsqueeze(-1), output.unsqueeze(-2)))

    def hidden_state(self, state: Streams) -> Tensor:
        return self.merged(state.streams)

    def finish(self, state: Streams, norm: NormLike) -> Tensor:
        last = self.num_sublayers
        weights = self.merged(self._made_of[last]).reshape(-1, last + 1) if self.watched else None
        return self.normed(self.merged(state.streams), last, norm, weights)
