"""LR-AttnRes: Attention Residuals with low-rank keys, projected from each output."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.ops.norms import normed_product
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Traits, outputs
from attnres.residuals.mechanisms.weighting import EmbeddingKeyKind, weighted_sum
from attnres.residuals.settings import mean_or_sum, one_of, positive, whole
from attnres.residuals.state import Slot, slots_of
from attnres.residuals.watch import NormLike

MOST_RANK = 64
"""The default rank: the published one, or the width if that is less."""


class Keyed(NamedTuple):
    """The embedding and outputs so far, (..., d) each, and the logits of each in reads 1 to L, (..., L)."""

    values: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]


class LRAttnRes(Residual):
    """h_l = sum_i a_i v_i,  a = softmax_i( q_l . N(k_i) / sqrt(r) ),  k_i = N(v_i) P_i, P_i (d, r); h_0 = v_0.

    `query` q is (L, r), for reads 1 to L, the output's; `projection` P (L+1, d, r), for the embedding and every output;
    N an RMSNorm without gain. q = 0 at the start, so the read is the mean of its sources: up to its scale, the standard
    residual. P is normal with deviation 0.02. Queries do not depend on the token, so a source's logits in all later
    reads are computed when it is written, and keys are not stored. Parameters: r (d (L+1) + L).

    As published, keys are r additional outputs of each sublayer's last projection (d to d + r). A residual sees only
    the sublayer's output, so this is the low-rank projection of it that the authors' code also offers
    (`lrid_key_from_value`, one for each source). One head, no blocks.

    `embedding_key` "static" has a learned k_0 (r,) for all tokens in place of N(v_0) P_0, from N(0, 0.02^2).

    `read_scale` "sum" is not published: weights then sum to the number of sources, so that the start is the standard
    residual exactly, with no change of eps.

    Source: "LR-AttnRes", arXiv 2607.09694, and the author's code, github.com/jon123boss/LR-AttnRes.
    """

    name = "lr_attnres"
    traits = Traits(True, sums_to_one=True, has_query=False, starts_standard=True)
    about = About(
        "h_l = sum_i softmax_i(q_l . N(N(v_i) P_i) / sqrt(r)) v_i, q and keys r-wide",
        "q = 0, P normal(0.02)",
        "about L/2 + 2",
        "arXiv 2607.09694",
    )

    hands_on_sum = True

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        rank: int | None = None,
        key_norm_eps: float = 1e-6,
        read_scale: Literal["mean", "sum"] = "mean",
        embedding_key: EmbeddingKeyKind = "own",
    ) -> None:
        super().__init__(num_sublayers, width)
        self.read_scale = mean_or_sum(read_scale)
        self.traits = self.traits._replace(sums_to_one=read_scale == "mean")
        self.rank = min(MOST_RANK, width) if rank is None else whole("rank", rank)
        if self.rank > width:
            raise UserError(f"rank is {rank}: expected at most the width {width}")
        self.key_norm_eps = positive("key_norm_eps", key_norm_eps)
        self.query = nn.Parameter(torch.empty(num_sublayers, self.rank))
        static = one_of("embedding_key", embedding_key, ("own", "static")) == "static"
        self.projection = nn.Parameter(torch.empty(num_sublayers + 1 - static, width, self.rank))
        self.embedding_key = nn.Parameter(torch.empty(self.rank)) if static else None
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.normal_(self.projection, std=0.02)
        if self.embedding_key is not None:
            nn.init.normal_(self.embedding_key, std=0.02)

    def _logits(self, value: Tensor, number: int) -> Tensor:
        """Return the logits (..., L) of source `number` in reads 1 to L."""
        dtype = compute_dtype(value.dtype)
        with full_precision(value):
            if self.embedding_key is not None and number == 0:
                key = self.embedding_key.to(dtype).expand(*value.shape[:-1], self.rank)
            else:
                projection = self.projection[number - (self.embedding_key is not None)].to(dtype)
                key = normed_product(value.to(dtype), projection, self.key_norm_eps)
            return normed_product(key, self.query.to(dtype).t() * self.rank**-0.5, self.key_norm_eps)

    def start(self, embedding: Tensor) -> Keyed:
        return Keyed((embedding,), (self._logits(embedding, 0),))

    def read(self, state: Keyed, index: int, norm: NormLike) -> tuple[Tensor, Keyed]:
        first = state.values[0]
        if index == 0:  # the read of one source is the source
            return self.normed(first, index, norm), state
        with full_precision(first):
            weights = torch.stack([logits[..., index - 1] for logits in state.logits], -1).softmax(-1)
            if self.read_scale == "sum":
                weights = weights * (index + 1)
            h = weighted_sum(state.values, weights.unsqueeze(-2).unbind(-1)).to(first.dtype)
        shown = weights.detach().reshape(-1, index + 1) if self.watched else None
        return self.normed(h, index, norm, shown), state

    def write(self, state: Keyed, index: int, output: Tensor) -> Keyed:
        return Keyed((*state.values, output), (*state.logits, self._logits(output, index + 1)))

    def slots(self, index: int) -> tuple[Slot, ...]:
        return slots_of(outputs(index + 1, self.sublayers), index)

    def pack(self, state: Keyed, index: int) -> tuple[Tensor, ...]:
        return state.values

    def unpack(self, tensors: Sequence[Tensor], index: int) -> Keyed:
        return Keyed(tuple(tensors), tuple(self._logits(value, number) for number, value in enumerate(tensors)))

    def hidden_state(self, state: Keyed) -> Tensor:
        return torch.stack(state.values).sum(0)
