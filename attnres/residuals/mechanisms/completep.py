"""CompleteP's branch factor: outputs divided by depth, a control without growth and without reads."""

from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.one_stream import ScalarMix
from attnres.residuals.settings import whole


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
