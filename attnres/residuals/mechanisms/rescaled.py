"""The control: the mean of all earlier outputs instead of their sum."""

import torch
from torch import Tensor

from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.standard import Standard


class Rescaled(Standard):
    """h_{l+1} = (l / (l+1)) h_l + (1 / (l+1)) f_l: uniform depth weights, nothing learned (l sources so far).

    Attention Residuals start here (zero queries) and must beat it. Where each read is followed by a norm, this is the
    same function as `standard` up to the norm's eps, so the two also show how large chance differences are.
    """

    name = "rescaled"
    traits = Traits(False, sums_to_one=True, has_query=False, starts_standard=True, is_control=True, colour="#cc79a7")
    about = About("(l/(l+1)) x + (1/(l+1)) f(N x)", "nothing", "3", "control; arXiv 2603.15031 starts there")

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.lerp(state, output.to(state.dtype), 1.0 / (index + 2))

    def implied(self, index: int) -> Tensor:
        return torch.full((index + 1,), 1.0 / (index + 1))
