"""What Full and Block Attention Residuals share: pseudo-queries, the two-phase schedule, the state."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..ops import Norm, apply_norm, inverse_rms, merge, read_sealed
from .base import NormLike, Residual, positive


class DepthState(NamedTuple):
    """Sources of one forward pass, and phase 1 of the reads that the current group has still to make.

    Attributes:
        sealed, sealed_inv_rms: finished sources (..., d) and one scalar per token for each.
        open, open_inv_rms: the current group's sources: its partial sum (Block) or its outputs so far (Full).
        outputs, top, total: phase 1 of the coming reads, the next one first: (T, d), (T,) and (T,).
        logits: (T, n, reads of the group), no gradient.
    """

    sealed: tuple[Tensor, ...]
    sealed_inv_rms: tuple[Tensor, ...]
    open: tuple[Tensor, ...]
    open_inv_rms: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    top: tuple[Tensor, ...]
    total: tuple[Tensor, ...]
    logits: Tensor


class DepthAttention(Residual):
    """Each sublayer reads a learned softmax over earlier outputs, h_l = sum_i a_{i->l} v_i.

        a_{.->l} = softmax_i( w_l . (g_l * v_i / rms(v_i)) )

    Pseudo-queries `query` and key gains `gain` are (L+1, d), one row per sublayer and one for the output. Queries start
    at zero: every weight is then uniform, and a pre-norm network computes what it computed without depth reads.

    Args:
        group: sublayers whose reads share one pass over the sealed sources.
        key_norm_eps: of the key norm.
        read_scale: "mean" is the formula above. "sum" multiplies the read by its number of sources, as if the following
            norm's eps were divided by its square: with zero queries logits are then those of the standard residual
            exactly, with no change of eps. For training the two differ by eps alone.

    Source: arXiv 2603.15031.
    """

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        group: int,
        key_norm_eps: float = 1e-6,
        read_scale: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(num_sublayers, width)
        if read_scale not in ("mean", "sum"):
            raise UserError(f"read_scale is '{read_scale}': expected 'mean' (the paper's) or 'sum' (exact conversion)")
        self.group, self.read_scale = group, read_scale
        self.key_norm_eps = positive("key_norm_eps", key_norm_eps)
        self.query = nn.Parameter(torch.empty(num_sublayers + 1, width))
        self.gain = nn.Parameter(torch.empty(num_sublayers + 1, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.gain)

    def add_open(self, opens: tuple[Tensor, ...], output: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The group's open sources once it has one more output; only the last one may be new."""
        raise NotImplementedError

    def source_names(self, state: DepthState, index: int) -> Sequence[str]:
        """Names of what read `index` mixes, sealed then open."""
        raise NotImplementedError

    def _scaled_queries(self, start: int) -> Tensor:
        stop = min(start + self.group, self.num_sublayers) if start < self.num_sublayers else start + 1
        return self.query[start:stop] * self.gain[start:stop]

    def _begin_group(self, sealed: tuple[Tensor, ...], inv_rms: tuple[Tensor, ...], index: int) -> DepthState:
        phase1 = read_sealed(sealed, inv_rms, self._scaled_queries(index))
        return DepthState(sealed, inv_rms, (), (), *phase1)

    def start(self, embedding: Tensor) -> DepthState:
        return self._begin_group((embedding,), (inverse_rms(embedding, self.key_norm_eps),), 0)

    def read(self, state: DepthState, index: int, norm: NormLike) -> tuple[Tensor, DepthState]:
        embedding = state.sealed[0]
        rest = state._replace(outputs=state.outputs[1:], top=state.top[1:], total=state.total[1:])
        if len(state.sealed) == 1 and not state.open:  # one source: itself, and exactly no gradient for the query
            if self.observer is not None:
                ones = embedding.new_ones(embedding[..., 0].numel(), 1)
                self.observer.on_read(index, embedding, ones, self.source_names(state, index))
            return apply_norm(embedding, norm) if isinstance(norm, Norm) else norm(embedding), rest
        scaled = (self.query[index] * self.gain[index]) if state.open else self.query[index]
        fused = norm if isinstance(norm, Norm) else None
        count = len(state.sealed) + len(state.open)
        if fused is not None:
            eps = fused.eps / count**2 if self.read_scale == "sum" else fused.eps
            fused = fused._replace(eps=eps, out_dtype=fused.out_dtype or embedding.dtype)
        merged = merge(
            state.outputs[0],
            state.top[0],
            state.total[0],
            state.open,
            state.open_inv_rms,
            scaled,
            fused,
            dtype=embedding.dtype,
        )
        if self.observer is not None:
            sealed = state.logits[:, :, -len(state.outputs)].softmax(1) * merged.sealed.unsqueeze(1)
            weights = torch.cat([sealed, merged.weights], 1)
            self.observer.on_read(index, merged.h, weights, self.source_names(state, index))
        x = merged.x.view(embedding.shape)
        if fused is None:
            assert not isinstance(norm, Norm)
            x = norm(x * count if self.read_scale == "sum" else x)
        return x, rest

    def write(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        opens = self.add_open(state.open, output, state.sealed[0].dtype)
        inv_rms = (*state.open_inv_rms[: len(opens) - 1], inverse_rms(opens[-1], self.key_norm_eps))
        if (index + 1) % self.group and index + 1 < self.num_sublayers:
            return state._replace(open=opens, open_inv_rms=inv_rms)
        return self._begin_group(state.sealed + opens, state.sealed_inv_rms + inv_rms, index + 1)

    def hidden_state(self, state: DepthState) -> Tensor:
        total = state.sealed[0]
        for source in state.sealed[1:] + state.open:
            total = total + source
        return total

    def finish(self, state: DepthState, norm: NormLike) -> Tensor:
        return self.read(state, self.num_sublayers, norm)[0]
