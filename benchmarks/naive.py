"""The read as one writes it first: stack the sources, norm, einsum, softmax, einsum, all through autograd.

Registered as residuals `naive_block` and `naive_full` for the benchmarks; same parameters, same function, other costs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.residuals import RESIDUALS, NormLike, Residual
from attnres.residuals.base import full_precision
from attnres.residuals.block import resolve_block_size


class Sources(NamedTuple):
    blocks: tuple[Tensor, ...]
    partial: tuple[Tensor, ...] = ()


class NaiveBlock(Residual):
    name = "naive_block"

    def __init__(self, num_sublayers: int, width: int, *, num_blocks: int | None = None) -> None:
        super().__init__(num_sublayers, width)
        self.block_size = resolve_block_size(num_sublayers, None, num_blocks)
        self.query = nn.Parameter(torch.zeros(num_sublayers + 1, width))
        self.gain = nn.Parameter(torch.ones(num_sublayers + 1, width))

    def start(self, embedding: Tensor) -> Sources:
        return Sources((embedding,))

    def read(self, state: Sources, index: int, norm: NormLike) -> tuple[Tensor, Sources]:
        embedding = state.blocks[0]
        with full_precision(embedding):
            values = torch.stack([source.to(embedding.dtype) for source in state.blocks + state.partial])
            keys = F.rms_norm(values.float(), (self.width,), self.gain[index], 1e-6)
            weights = torch.einsum("d,n...d->n...", self.query[index], keys).softmax(0).to(values.dtype)
            h = torch.einsum("n...,n...d->...d", weights, values)
        return self.normed(h, index, norm), state

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


def register() -> None:
    """Make `naive_block` and `naive_full` known by name in this process."""
    RESIDUALS.update({cls.name: cls for cls in (NaiveBlock, NaiveFull)})
