"""The running sum of a pre-norm transformer (the baseline), its placebo control, and the bases of rules with one
running stream."""

import torch
from torch import Tensor

from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Source, Traits
from attnres.residuals.program import BankReads
from attnres.residuals.state import State
from attnres.residuals.watch import NormLike


class OneStream(Residual):
    """The state is the stream x, (..., d). A subclass defines `write`; reads and the head take N(x)."""

    def start(self, embedding: Tensor) -> State:
        return embedding

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        return self.normed(state, index, norm), state

    def hidden_state(self, state: State) -> Tensor:
        return state

    def finish(self, state: State, norm: NormLike) -> Tensor:
        return self.normed(state, self.num_sublayers, norm)


class ScalarMix(OneStream):
    """x_{l+1} = a_l x_l + b_l f_l. In terms of sources, h_l = sum_i (b_i prod_{i < j < l} a_j) v_i."""

    def shortcut(self, index: int) -> Tensor | float | None:
        """Return a of sublayer `index`, a number; None is one."""
        return None

    def branch(self, index: int) -> Tensor | float:
        """Return b of sublayer `index`, a number."""
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        shortcut = self.shortcut(index)
        kept = state if shortcut is None else state * shortcut
        return kept + output.to(state.dtype) * self.branch(index)

    def implied(self, read: int) -> Tensor | None:
        return self.weights_by_verbs(read)


class Standard(OneStream):
    """PreNorm: h_{l+1} = h_l + f_l(norm_l(h_l)). In terms of sources, h_l is the unweighted sum of v_0 .. v_{l-1}.

    State: the running sum, (..., d).
    """

    name = "standard"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, colour="#4a5260")
    about = About("x + f(N x)", "nothing", "3", "Xiong et al., arXiv 2002.04745")

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return state + output

    hands_on_sum = True

    def bank_reads(self) -> BankReads | str:
        reads = range(self.num_sublayers + 1)
        streams = [(Source("stream", None, range(index + 1), open=True),) for index in reads]
        return BankReads(streams, [None] * len(reads))

    def bank_queries(self) -> Tensor:
        return torch.empty(0)

    def implied(self, read: int) -> Tensor:
        return torch.ones(read + 1)


class Rescaled(Standard):
    """h_{l+1} = (l / (l+1)) h_l + (1 / (l+1)) f_l: uniform depth weights, nothing learned (l sources so far).

    Attention Residuals start as this function (zero queries). If a norm follows each read, it is mathematically the
    same as `standard` up to the norm's eps, so any difference between the two is noise.
    """

    name = "rescaled"
    traits = Traits(False, sums_to_one=True, has_query=False, starts_standard=True, is_control=True, colour="#cc79a7")
    about = About("(l/(l+1)) x + (1/(l+1)) f(N x)", "nothing", "3", "control; arXiv 2603.15031 starts there")

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.lerp(state, output.to(state.dtype), 1.0 / (index + 2))

    def handed_on(self, state: Tensor) -> Tensor:
        return state * (self.num_sublayers + 1)

    def implied(self, read: int) -> Tensor:
        return torch.full((read + 1,), 1.0 / (read + 1))
