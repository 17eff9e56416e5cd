"""The mechanisms of the package, in the order of the tables. A file holds a rule and its variants."""

from attnres.residuals.base import Residual
from attnres.residuals.mechanisms.adaptive import Adaptive
from attnres.residuals.mechanisms.all_outputs import DenseNet, StaticMix
from attnres.residuals.mechanisms.block import Block
from attnres.residuals.mechanisms.boundary import Boundary, BoundaryNormed, PostBlock
from attnres.residuals.mechanisms.branch_scales import CompleteP, LayerScale, NormPreserving, ReZero
from attnres.residuals.mechanisms.compose import Compose
from attnres.residuals.mechanisms.cumulative import Cumulative
from attnres.residuals.mechanisms.dca import DeepCrossAttention
from attnres.residuals.mechanisms.delta_attnres import DeltaAttnRes
from attnres.residuals.mechanisms.full import Full
from attnres.residuals.mechanisms.hyper_connections import FracConnections, HyperConnections
from attnres.residuals.mechanisms.inkling2 import Inkling2
from attnres.residuals.mechanisms.laurel import Laurel
from attnres.residuals.mechanisms.layer_sums import ANCRe, DenseFormer
from attnres.residuals.mechanisms.lr_attnres import LRAttnRes
from attnres.residuals.mechanisms.mhc import MHC, IdentityHC, MHCLite
from attnres.residuals.mechanisms.mrla_light import MRLALight
from attnres.residuals.mechanisms.muddformer import MuddFormer
from attnres.residuals.mechanisms.multi_gate import MultiGate
from attnres.residuals.mechanisms.norm_places import DeepNorm, HybridNorm, Keel, LayerNormScaling, PeriLN, PostNorm
from attnres.residuals.mechanisms.standard import Rescaled, Standard
from attnres.residuals.mechanisms.token_gates import DeepDelta, Highway, Review
from attnres.residuals.mechanisms.two_streams import ParallelLanes, SiameseNorm
from attnres.residuals.mechanisms.xhc import XHC

MECHANISMS: tuple[type[Residual], ...] = (
    # The baseline and its placebo controls.
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
    # Rules of one stream: the place of the norm,
    PostNorm,
    DeepNorm,
    HybridNorm,
    Keel,
    PeriLN,
    LayerNormScaling,
    # and the weights of stream and branch.
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
    # Rules that store earlier outputs.
    StaticMix,
    DenseFormer,
    ANCRe,
    DenseNet,
    MRLALight,
    DeltaAttnRes,
    LRAttnRes,
    # Separate reads for queries, keys and values.
    MuddFormer,
    DeepCrossAttention,
    Inkling2,
    # Several rules in one network.
    Compose,
)
