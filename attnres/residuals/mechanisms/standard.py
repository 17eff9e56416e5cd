"""The running sum of a pre-norm transformer (the baseline), and its placebo control, the running mean."""

import torch
from torch import Tensor

from attnres.residuals.layout import About, Source, Traits
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.program import BankReads


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
