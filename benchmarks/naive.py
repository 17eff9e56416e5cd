"""The read as one writes it first: stack the sources, norm, einsum, softmax, einsum, all through autograd.

Registered as residuals `naive_block` and `naive_full` for the benchmarks; same parameters, same function, other costs.
A peer's read takes the place of the naive one in `peer_residual`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peers import Peer
from torch import Tensor, nn

from attnres.ops import Norm, compute_dtype, full_precision
from attnres.residuals import NormLike, Residual, register
from attnres.residuals.mechanisms.block import Block, resolve_block_sizes

EPS = 1e-6
"""Of the key norm."""


def naive_read(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """One read of sources (..., d) of one dtype."""
    values = torch.stack(tuple(sources))
    keys = F.rms_norm(values.to(compute_dtype(values.dtype)), values.shape[-1:], gain, eps)
    weights = torch.einsum("d,n...d->n...", query, keys).softmax(0).to(values.dtype)
    return torch.einsum("n...,n...d->...d", weights, values)


class Sources(NamedTuple):
    blocks: tuple[Tensor, ...]
    partial: tuple[Tensor, ...] = ()


class NaiveBlock(Residual):
    name = "naive_block"
    traits = Block.traits

    def __init__(
        self, num_sublayers: int, width: int, *, num_blocks: int | None = None, block_size: int | None = None
    ) -> None:
        super().__init__(num_sublayers, width)
        self.block_size = resolve_block_sizes(num_sublayers, block_size, num_blocks)[0]
        self.query = nn.Parameter(torch.zeros(num_sublayers + 1, width))
        self.gain = nn.Parameter(torch.ones(num_sublayers + 1, width))

    def start(self, embedding: Tensor) -> Sources:
        return Sources((embedding,))

    def mix(self, sources: list[Tensor], index: int, norm: NormLike) -> Tensor:
        """The normed read `index`."""
        return self.normed(naive_read(sources, self.query[index], self.gain[index]), index, norm)

    def read(self, state: Sources, index: int, norm: NormLike) -> tuple[Tensor, Sources]:
        embedding = state.blocks[0]
        with full_precision(embedding):
            sources = [source.to(embedding.dtype) for source in state.blocks + state.partial]
            return self.mix(sources, index, norm), state

    def write(self, state: Sources, index: int, output: Tensor) -> Sources:
        partial = state.partial[0].to(state.blocks[0].dtype) + output if state.partial else output
        if (index + 1) % self.block_size == 0 or index + 1 == self.num_sublayers:
            return Sources((*state.blocks, partial))
        return Sources(state.blocks, (partial,))

    def finish(self, state: Sources, norm: NormLike) -> Tensor:
        return self.read(state, self.num_sublayers, norm)[0]


class NaiveFull(NaiveBlock):
    name = "naive_full"

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width, num_blocks=num_sublayers)


def block_name(peer: Peer) -> str:
    """What `peer_residual` is registered as."""
    return "_".join(re.findall(r"[a-z0-9]+", f"{peer.name} block"))


def peer_residual(peer: Peer) -> type[NaiveBlock]:
    """Block Attention Residuals with a peer's read, and its norm where the peer fuses one.

    The stream is in the embedding's dtype, or in bf16 for a peer that takes nothing wider.
    """

    class PeerBlock(NaiveBlock):
        name = block_name(peer)

        def start(self, embedding: Tensor) -> Sources:
            return Sources((embedding if embedding.dtype in peer.dtypes else embedding.to(peer.dtypes[0]),))

        def mix(self, sources: list[Tensor], index: int, norm: NormLike) -> Tensor:
            query, gain = self.query[index], self.gain[index]
            fused = isinstance(norm, Norm) and norm.weight is not None and norm.bias is None and not norm.center
            if peer.fuses_norm and fused and norm.eps == EPS:
                return peer.read(sources, query, gain, EPS, norm.weight).to(norm.out_dtype or sources[0].dtype)
            return self.normed(peer.read(sources, query, gain, EPS), index, norm)

        def write(self, state: Sources, index: int, output: Tensor) -> Sources:
            return super().write(state, index, output.to(state.blocks[0].dtype))

    return PeerBlock


def register_naive(peers: Sequence[Peer] = ()) -> None:
    """Make `naive_block`, `naive_full` and the peers' blocks known by name in this process."""
    for cls in (NaiveBlock, NaiveFull, *map(peer_residual, peers)):
        register(cls)
