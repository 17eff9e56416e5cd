"""HybridNorm's residual: attention's sum goes on as it is, the MLP's norm becomes the stream."""

from torch import Tensor

from attnres.residuals.layout import About
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.mechanisms.postnorm import PostNorm
from attnres.residuals.settings import whole
from attnres.residuals.watch import NormLike


class HybridNorm(PostNorm):
    """y = x + attention(N x), x = N(y) + mlp(N(y)): the norm between a layer's sublayers is a post-norm.

    The publication's attention has no norm in front of it: it norms queries, keys and values instead. That is inside
    attention and not here; the decoder's own pre-norm stands in for it (a family with norms of queries and keys, such
    as qwen3, keeps those besides).

    Args:
        prenorm_layers: this many first layers are x + f(N x) throughout; 1 is the publication's HybridNorm*.

    Costs no parameters.

    Source: Zhuo et al., "HybridNorm", arXiv 2503.04598.
    """

    name = "hybrid_norm"
    about = About(
        "y = x + f(N x), then N(y) + f(N(y))", "nothing", "3", "the residual of Zhuo et al., arXiv 2503.04598"
    )

    def __init__(self, num_sublayers: int, width: int, *, prenorm_layers: int = 0) -> None:
        super().__init__(num_sublayers, width)
        self.prenorm_layers = whole("prenorm_layers", prenorm_layers, least=0)

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        layer, place = divmod(index, len(self.sublayers))
        if layer < self.prenorm_layers or self.sublayers[place] != "mlp":
            return OneStream.read(self, state, index, norm)
        return super().read(state, index, norm)
