"""The mechanisms that ship with the package, one file each, in the order in which tables name them."""

from attnres.residuals.base import Residual
from attnres.residuals.mechanisms.block import Block
from attnres.residuals.mechanisms.boundary import Boundary, BoundaryNormed
from attnres.residuals.mechanisms.cumulative import Cumulative
from attnres.residuals.mechanisms.deepnorm import DeepNorm
from attnres.residuals.mechanisms.denseformer import DenseFormer
from attnres.residuals.mechanisms.frac_connections import FracConnections
from attnres.residuals.mechanisms.full import Full
from attnres.residuals.mechanisms.hyper_connections import HyperConnections
from attnres.residuals.mechanisms.identity_hc import IdentityHC
from attnres.residuals.mechanisms.mhc import MHC
from attnres.residuals.mechanisms.mhc_lite import MHCLite
from attnres.residuals.mechanisms.parallel_lanes import ParallelLanes
from attnres.residuals.mechanisms.post_block import PostBlock
from attnres.residuals.mechanisms.rescaled import Rescaled
from attnres.residuals.mechanisms.standard import Standard

MECHANISMS: tuple[type[Residual], ...] = (
    # The baseline and what controls for its scale.
    Standard,
    Rescaled,
    # Attention Residuals, and the layouts of other projects.
    Full,
    Block,
    Cumulative,
    Boundary,
    BoundaryNormed,
    PostBlock,
    # Rules of one stream.
    DeepNorm,
    # Several streams.
    HyperConnections,
    MHC,
    MHCLite,
    IdentityHC,
    FracConnections,
    ParallelLanes,
    # Rules that keep earlier outputs.
    DenseFormer,
)
