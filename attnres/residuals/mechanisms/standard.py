"""The plain running sum that every pre-norm transformer has."""

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

    def bank_reads(self) -> BankReads | str:
        reads = range(self.num_sublayers + 1)
        streams = [(Source("stream", None, range(index + 1), open=True),) for index in reads]
        return BankReads(streams, [None] * len(reads))

    def bank_queries(self) -> Tensor:
        return torch.empty(0)

    def implied(self, index: int) -> Tensor:
        return torch.ones(index + 1)
