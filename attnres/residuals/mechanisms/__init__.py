"""The mechanisms that ship with the package, in the order of the tables. A file has a rule and its variants."""

from attnres.residuals.base import Residual
from attnres.residuals.mechanisms.adaptive import Adaptive
from attnres.residuals.mechanisms.all_outputs import DenseNet, StaticMix
from attnres.residuals.mechanisms.block import Block
from attnres.residuals.mechanisms.boundary import Boundary, BoundaryNormed, PostBlock
from attnres.residuals.mechanisms.completep import CompleteP
from attnres.residuals.mechanisms.compose import Compose
from attnres.residuals.mechanisms.cumulative import Cumulative
from attnres.residuals.mechanisms.dca import DeepCrossAttention
from attnres.residuals.mechanisms.ddl import DeepDelta
from attnres.residuals.mechanisms.delta_attnres import DeltaAttnRes
from attnres.residuals.mechanisms.full import Full
from attnres.residuals.mechanisms.highway import Highway
from attnres.residuals.mechanisms.hybrid_norm import HybridNorm
from attnres.residuals.mechanisms.hyper_connections import FracConnections, HyperConnections
from attnres.residuals.mechanisms.inkling2 import Inkling2
from attnres.residuals.mechanisms.keel import Keel
from attnres.residuals.mechanisms.laurel import Laurel
from attnres.residuals.mechanisms.layer_sums import ANCRe, DenseFormer
from attnres.residuals.mechanisms.layernorm_scaling import LayerNormScaling
from attnres.residuals.mechanisms.layerscale import LayerScale
from attnres.residuals.mechanisms.lr_attnres import LRAttnRes
from attnres.residuals.mechanisms.mhc import MHC, IdentityHC, MHCLite
from attnres.residuals.mechanisms.mrla_light import MRLALight
from attnres.residuals.mechanisms.muddformer import MuddFormer
from attnres.residuals.mechanisms.multi_gate import MultiGate
from attnres.residuals.mechanisms.norm_preserving import NormPreserving
from attnres.residuals.mechanisms.parallel_lanes import ParallelLanes
from attnres.residuals.mechanisms.peri_ln import PeriLN
from attnres.residuals.mechanisms.postnorm import DeepNorm, PostNorm
from attnres.residuals.mechanisms.review import Review
from attnres.residuals.mechanisms.rezero import ReZero
from attnres.residuals.mechanisms.siamese_norm import SiameseNorm
from attnres.residuals.mechanisms.standard import Rescaled, Standard
from attnres.residuals.mechanisms.xhc import XHC

MECHANISMS: tuple[type[Residual], ...] = (
    # The baseline and what controls for its scale.
    Standard,
    Rescaled,
    CompleteP,
    # Attention Residuals, and the layouts of other projects.
    Full,
    Block,
    Cumulative,
    Boundary,
    BoundaryNormed,
    PostBlock,
    Adaptive,
    # Rules of one stream: where its norm sits,
    PostNorm,
    DeepNorm,
    HybridNorm,
    Keel,
    PeriLN,
    LayerNormScaling,
    # and what stream and branch are weighed with.
    ReZero,
    LayerScale,
    NormPreserving,
    Highway,
    Review,
    DeepDelta,
    Laurel,
    # Several streams.
    SiameseNorm,
    HyperConnections,
    MHC,
    MHCLite,
    IdentityHC,
    XHC,
    FracConnections,
    ParallelLanes,
    MultiGate,
    # Rules that keep earlier outputs.
    StaticMix,
    DenseFormer,
    ANCRe,
    DenseNet,
    MRLALight,
    DeltaAttnRes,
    LRAttnRes,
    # A read of its own for queries, keys and values.
    MuddFormer,
    DeepCrossAttention,
    Inkling2,
    # Several rules in one network.
    Compose,
)
