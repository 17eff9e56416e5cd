"""Rules that store the embedding and every output separately: DenseNet and static mixing."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.weighting import weighted_sum
from attnres.residuals.settings import one_of, start_at
from attnres.residuals.watch import NormLike


class AllOutputs(Residual):
    """A state of the embedding and every output, each (..., d); a subclass defines how `read` combines them."""

    hands_on_sum = True

    def start(self, embedding: Tensor) -> tuple[Tensor, ...]:
        return (embedding,)

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError

    def write(self, state: tuple[Tensor, ...], index: int, output: Tensor) -> tuple[Tensor, ...]:
        return (*state, output)

    def hidden_state(self, state: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(state).sum(0)


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
        """Return the weights a (index + 1,) of read `index`."""
        row = self.logits[index, : index + 1].to(compute_dtype(dtype))
        return row if self.raw else row.softmax(0)

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        dtype = state[0].dtype
        weights = self.coefficients(index, dtype)
        with full_precision(weights):
            h = weighted_sum([source.to(weights.dtype) for source in state], weights).to(dtype)
        return self.normed(h, index, norm, values=state), state

    @torch.no_grad()
    def implied(self, read: int) -> Tensor:
        return self.coefficients(read, torch.float32).cpu()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        rows = [self.implied(index) for index in range(len(self.logits))]
        table = pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        return {"mix": Learned(table, ("read", "source"), "coefficient of the embedding and each output")}


class DenseNet(AllOutputs):
    """h_l = [v_0 .. v_l] W_l, W_l ((l+1) d, d): a matrix (d, d) for each source of each read; h_0 = v_0.

    `projection` is (L (L+3) / 2, d, d): the matrices of reads 1 to L, the output's, one after another. They start as
    identities, which makes the standard residual (a DenseNet draws them; for transformers no start is published). The
    parameters are d^2 L (L+3) / 2 and so are the multiplications a token: more than the rest of most transformers.
    Products run in the precision of the network's own (autocast), their sums in fp32.

    Source: Huang et al., "Densely Connected Convolutional Networks", arXiv 1608.06993, as a transformer's residual.
    """

    name = "densenet"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, linear=False)
    about = About(
        "h_l = [v_0 .. v_l] W_l, W_l ((l+1) d, d)", "W_l = [I .. I]", "L/2 + 2", "Huang et al., arXiv 1608.06993"
    )

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self.projection = nn.Parameter(torch.empty(self.first_matrix(num_sublayers + 1), width, width))
        self.init_parameters()

    def first_matrix(self, index: int) -> int:
        """Return the number of matrices of the reads before `index`, which have 2, 3, .. `index` of them."""
        return index * (index + 1) // 2 - 1

    def init_parameters(self) -> None:
        start_at(self.projection, torch.eye(self.width).expand_as(self.projection))

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        h = state[0]
        if index > 0:
            first = self.first_matrix(index)
            matrices = self.projection[first : first + index + 1]
            total = (state[0] @ matrices[0].to(h.dtype)).to(compute_dtype(h.dtype))
            for i in range(1, index + 1):
                total = total + state[i] @ matrices[i].to(state[i].dtype)
            h = total.to(h.dtype)
        return self.normed(h, index, norm), state
