"""Identity Hyper-Connections: mHC whose streams are not mixed."""

from attnres.residuals.layout import About
from attnres.residuals.mechanisms.mhc import MHC


class IdentityHC(MHC):
    """As `mhc`, with A = I: streams differ by what they receive, and meet in reads alone.

    Sublayers start as in `mhc`, which is not the standard residual. Parameters of a sublayer: 2n (n d + 1) + n d + 2.

    Source: the ablation of Xie et al., arXiv 2512.24880; learned matrices A stay near I.
    """

    name = "identity_hc"
    about = About("as mhc, A = I", "as mhc", "6n + 2", "ablation of Xie et al., arXiv 2512.24880")
    carries = False
