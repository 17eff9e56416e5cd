"""The depth reads of Inkling 2: normed block sums, read separately by queries, keys and values."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.residuals.layout import About, Source, Traits, block_sources
from attnres.residuals.mechanisms.block import resolve_block_sizes
from attnres.residuals.mechanisms.mixtures import Kept, Mixtures
from attnres.residuals.settings import positive, whole
from attnres.residuals.state import Ways
from attnres.residuals.watch import NormLike, looking, watched, with_norm


class Inkling2(Mixtures):
    """h = sum_i a_i k_i,    a = softmax_i( w . k_i / sqrt(d) ),    k_i = v_i / rms(v_i)

    over the sources of `block`: the embedding, the sums of finished blocks, and the sum of the block in progress. An
    attention has a w for its queries, keys and values each; an MLP and the head have one. The first attention gets the
    embedding as it is. w = 0: the mean of normed sources, which is not the standard residual.

    `split_every` n splits the read only in every n-th layer: Inkling 2 splits those of its full-attention layers, n =
    6, and has one read before a sliding window. `block_size` and `num_blocks` count sublayers; Inkling 2 has 12 in a
    block.

    Source: `inkling2` in Transformers. Its norms of queries, keys and values have gains of their own: here they share
    one, which the projection behind it can hold as well.
    """

    name = "inkling2"
    traits = Traits(True, sums_to_one=True, has_query=True, starts_standard=False, linear=False)
    about = About(
        "as block, for q, k, v each: sum_i softmax_i(w . N(v_i) / sqrt(d)) N(v_i)",
        "w = 0",
        "about 2N + 4",
        "inkling2 in Transformers",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        block_size: int | str | Sequence[int] | None = None,
        num_blocks: int | None = None,
        split_every: int = 1,
        key_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(num_sublayers, width)
        self.bounds = (0, *accumulate(resolve_block_sizes(num_sublayers, block_size, num_blocks)))
        self.split_every, self.key_norm_eps = whole("split_every", split_every), positive("key_norm_eps", key_norm_eps)
        self.query = nn.Parameter(torch.empty(len(self.places()), width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def ways(self, index: int) -> tuple[str | None, ...]:
        split = index % 2 == 0 and (index // 2 + 1) % self.split_every == 0
        return Ways._fields if split and 0 < index < self.num_sublayers else (None,)

    def mix(self, index: int, values: Tensor) -> tuple[Tensor, Tensor]:
        row = self.first_row(index)
        query = self.query[row : row + len(self.ways(index))].to(values.dtype) / self.width**0.5
        keys = self._keys(values)
        weights = F.linear(keys, query).softmax(-2).mT
        return weights @ keys, weights

    def _keys(self, values: Tensor) -> Tensor:
        return F.rms_norm(values, (self.width,), None, self.key_norm_eps)

    def _reads(self, state: Kept, index: int) -> list[Tensor]:
        """Return the inputs of sublayer `index` (L: of the head), (..., d) each, after observers and editors."""
        sources, row = (*state.past, *state.inside), self.first_row(index)
        if len(sources) == 1:
            return [watched(self, sources[0], row, None, sources) if self.watched else sources[0]]
        parts, weights = self.mixed(index, sources)
        if not self.watched:
            return list(parts)
        rows = weights.reshape(-1, *weights.shape[-2:]).unbind(-2)
        with looking(self):
            keys = [self._keys(source.to(weights.dtype)) for source in sources]
        return [watched(self, h, row + way, rows[way], keys) for way, h in enumerate(parts)]

    def read(self, state: Kept, index: int, norm: NormLike) -> tuple[Tensor | Ways, Kept]:
        parts = [with_norm(h, norm) for h in self._reads(state, index)]
        return (parts[0] if len(parts) == 1 else Ways(*parts)), state

    def write(self, state: Kept, index: int, output: Tensor) -> Kept:
        partial = state.inside[0] + output if state.inside else output.to(state.past[0].dtype)
        return Kept((*state.past, partial)) if index + 1 in self.bounds else Kept(state.past, (partial,))

    def finish(self, state: Kept, norm: NormLike) -> Tensor:
        return with_norm(self._reads(state, self.num_sublayers)[0], norm)

    def hidden_state(self, state: Kept) -> Tensor:
        return torch.stack((*state.past, *state.inside)).sum(0)

    def sources(self, read: int) -> tuple[Source, ...]:
        return block_sources(self.bounds, self.places()[read][0])

    @torch.no_grad()
    def direction(self, read: int) -> Tensor | None:
        return self.query[read] if len(self.sources(read)) > 1 else None

    def sharpness(self, read: int) -> float | None:
        """Return |w|, since the logits are divided by sqrt(d)."""
        query = self.direction(read)
        return None if query is None else float(query.detach().double().norm())
