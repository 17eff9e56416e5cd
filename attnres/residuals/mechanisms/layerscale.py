"""LayerScale: every channel of a branch has a learned factor that starts small."""

import torch
from torch import Tensor, nn

from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.settings import positive


class LayerScale(OneStream):
    """x_{l+1} = x_l + s_l * f_l(N x_l), a learned number in s_l (d,) for each channel.

    s starts at 0.1 in networks of up to 18 layers, at 1e-5 up to 24, and at 1e-6 in deeper ones.

    With a factor a channel reads are no sums of outputs with one number each.

    Args:
        scale_init: where s starts instead.

    Costs d parameters a sublayer.

    Source: Touvron et al., "Going deeper with Image Transformers", arXiv 2103.17239.
    """

    name = "layerscale"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About(
        "x + s * f(N x), s a number a channel",
        "s = 0.1 up to 18 layers, 1e-5 up to 24, then 1e-6",
        "3",
        "Touvron et al., arXiv 2103.17239",
    )

    def __init__(self, num_sublayers: int, width: int, *, scale_init: float | None = None) -> None:
        super().__init__(num_sublayers, width)
        layers = num_sublayers / len(self.sublayers)
        published = 0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6
        self.scale_init = published if scale_init is None else positive("scale_init", scale_init)
        self.scale = nn.Parameter(torch.empty(num_sublayers, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.constant_(self.scale, self.scale_init)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.addcmul(state, self.scale[index].to(state.dtype), output.to(state.dtype))

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        size = self.scale.square().mean(-1).sqrt().float().cpu()
        return {"scale": Learned(size, ("sublayer",), "root mean square of s, the factors of an output")}
