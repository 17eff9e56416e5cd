"""Attention Residuals: transformers whose sublayers read a learned softmax over earlier outputs.

`import attnres` imports torch and no more. Models are in `attnres.models`, training in `attnres.train`, what depth
attention does in `attnres.inspect`, comparisons in `attnres.studies` and `attnres.report`.
"""

from .errors import UserError
from .ops import Norm, depth_read, depth_read_reference
from .residuals import RESIDUALS, Residual, make_residual

__version__ = "0.1.0"

__all__ = [
    "RESIDUALS",
    "Norm",
    "Residual",
    "UserError",
    "__version__",
    "depth_read",
    "depth_read_reference",
    "make_residual",
]
