"""Depth reads whose weights depend on no input: a learned number for each source of each read."""

from typing import Literal

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.arithmetic import weighted_sum
from attnres.residuals.base import NormLike
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.all_outputs import AllOutputs
from attnres.residuals.settings import one_of


class StaticMix(AllOutputs):
    """h_l = sum_i a_li v_i over the embedding and every earlier output, a_l = softmax(b_l): Full without queries, keys.

    `logits` b is (L+1, L+1), row l uses its first l+1 entries; b = 0 at the start, the mean of the sources. The paper
    says "learned scalars", and not whether they are normalised: `weights="raw"` takes a_l = b_l, from one.

    Source: arXiv 2603.15031, Table 4, "input-independent mixing".
    """

    name = "static_mix"
    traits = Traits(False, sums_to_one=True, has_query=False, starts_standard=True)
    about = About(
        "h_l = sum_i softmax_i(b_l) v_i over the embedding and every output",
        "b = 0",
        "about L/2",
        "Kimi Team, arXiv 2603.15031, Table 4",
    )

    def __init__(self, num_sublayers: int, width: int, *, weights: Literal["softmax", "raw"] = "softmax") -> None:
        super().__init__(num_sublayers, width)
        self.raw = one_of("weights", weights, ("softmax", "raw")) == "raw"
        self.traits = self.traits._replace(sums_to_one=not self.raw)
        self.logits = nn.Parameter(torch.empty(num_sublayers + 1, num_sublayers + 1))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.constant_(self.logits, float(self.raw))

    def coefficients(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return a (index + 1,) of read `index`."""
        row = self.logits[index, : index + 1].to(compute_dtype(dtype))
        return row if self.raw else row.softmax(0)

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        dtype = state[0].dtype
        weights = self.coefficients(index, dtype)
        with full_precision(weights):
            h = weighted_sum([source.to(weights.dtype) for source in state], weights).to(dtype)
        return self.normed(h, index, norm, values=state), state

    @torch.no_grad()
    def implied(self, index: int) -> Tensor:
        return self.coefficients(index, torch.float32).cpu()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        table = torch.full_like(self.logits, torch.nan, device="cpu", dtype=torch.float32)
        for index in range(len(table)):
            table[index, : index + 1] = self.implied(index)
        return {"mix": Learned(table, ("read", "source"), "coefficient of the embedding and each output")}
