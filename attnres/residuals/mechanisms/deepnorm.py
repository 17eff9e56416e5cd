"""DeepNorm: a post-norm whose shortcut is scaled up and whose branches start small."""

from attnres.residuals.layout import About
from attnres.residuals.mechanisms.postnorm import PostNorm


class DeepNorm(PostNorm):
    """x_{l+1} = norm(a x_l + f_l(x_l)), a = (2M)^(1/4) for M layers; value, output and MLP weights start / (8M)^(1/4).

    Norms and state are those of PostNorm.

    Source: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv 2203.00555, decoder-only column.
    """

    name = "deepnorm"
    traits = PostNorm.traits._replace(scales_branches=True, colour="#e69f00")
    even_start = True
    about = About(
        "N(a x + f(x)), a = (2M)^(1/4)",
        "value, output and MLP weights / (8M)^(1/4)",
        "3",
        "Wang et al., arXiv 2203.00555",
    )

    def branch_scale(self) -> float:
        return (4 * self.num_sublayers) ** -0.25

    def shortcut(self) -> float:
        return self.num_sublayers**0.25
