"""Rules of one stream that scale branches: ReZero, LayerScale, the norm-preserving mix, CompleteP's factor."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.standard import OneStream, ScalarMix
from attnres.residuals.settings import positive, true_or_false, whole
from attnres.residuals.state import as_it_is
from attnres.residuals.watch import NormLike


class ReZero(ScalarMix):
    """x_{l+1} = x_l + a_l f_l(N x_l), a learned number a_l for each sublayer that starts at 0.

    The head first reads the embedding alone, so that this is not the standard residual at the start.

    Args:
        prenorm: whether sublayers read N x. The publication's networks have no norms: false gives x + a f(x), in which
            a decoder's own pre-norms go unused, so that their gains have no gradient (DDP refuses such parameters).

    Costs one parameter a sublayer.

    Source: Bachlechner et al., "ReZero is All You Need", arXiv 2003.04887.
    """

    name = "rezero"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About("x + a f(N x), a number a", "a = 0", "3", "Bachlechner et al., arXiv 2003.04887")

    def __init__(self, num_sublayers: int, width: int, *, prenorm: bool = True) -> None:
        super().__init__(num_sublayers, width)
        self.prenorm = true_or_false("prenorm", prenorm)
        self.scale = nn.Parameter(torch.empty(num_sublayers))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        return super().read(state, index, norm if self.prenorm else as_it_is)

    def branch(self, index: int) -> Tensor:
        return self.scale[index]

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        return {"scale": Learned(self.scale.float().cpu(), ("sublayer",), "a, the factor of each output")}


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


class NormPreserving(ScalarMix):
    """x_{l+1} = sqrt(1 - b/M) x_l + sqrt(b/M) f_l(N x_l), b = softplus(t) for M layers.

    Stream and output of one length and at right angles give a stream of that length. t is one learned number a layer,
    for both of its sublayers, which starts at 0 (b = log 2); b stays below M.

    Costs one parameter a layer.

    Source: marin, issue 8860 (github.com/marin-community/marin), experiments/grug/moe_norm_preserving_residual.
    """

    name = "norm_preserving"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About("sqrt(1 - b/M) x + sqrt(b/M) f(N x), M layers", "b = log 2", "3", "marin-community/marin, issue 8860")

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self.layers = -(-num_sublayers // len(self.sublayers))
        self.theta = nn.Parameter(torch.empty(self.layers))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.theta)

    def share(self) -> Tensor:
        """Return b/M of each layer, (M,)."""
        return (F.softplus(self.theta) / self.layers).clamp_max(0.999)

    def shortcut(self, index: int) -> Tensor:
        return (1.0 - self.share()[index // len(self.sublayers)]).sqrt()

    def branch(self, index: int) -> Tensor:
        return self.share()[index // len(self.sublayers)].sqrt()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        return {"share": Learned(self.share().float().cpu(), ("layer",), "b/M, the square of an output's weight")}


class CompleteP(ScalarMix):
    """x_{l+1} = x_l + (M_0 / M) f_l(N x_l) for M layers: the stream does not grow with depth, and nothing is learned.

    This is the forward pass of CompleteP (its depth exponent 1) and no more. Its rules for what depth and width do to
    start values, learning rates, weight decay and Adam's eps are not here: train with your own, or set them yourself.

    Args:
        base_layers: M_0, the depth at which the other hyper-parameters were chosen; 1 divides by the depth itself.

    Source: Dey et al., "Don't be lazy: CompleteP enables compute-efficient deep transformers", arXiv 2505.01618.
    """

    name = "completep"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, is_control=True)
    about = About("x + f(N x) / M, M layers", "nothing", "3", "control; Dey et al., arXiv 2505.01618")

    def __init__(self, num_sublayers: int, width: int, *, base_layers: int = 1) -> None:
        super().__init__(num_sublayers, width)
        self.base_layers = whole("base_layers", base_layers)

    def branch(self, index: int) -> float:
        return self.base_layers * len(self.sublayers) / self.num_sublayers
