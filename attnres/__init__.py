"""Attention Residuals: transformers whose sublayers read a learned softmax over earlier outputs.

`import attnres` imports torch and no more. Models are in `attnres.models`, training in `attnres.training`, what depth
attention does in `attnres.inspect`, comparisons in `attnres.studies` and `attnres.report`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from attnres.errors import UserError
from attnres.ops import Norm, depth_read, depth_read_reference
from attnres.residuals import RESIDUALS, Residual, make_residual

if TYPE_CHECKING:
    from attnres.evals.generate import generate
    from attnres.inspect import record
    from attnres.models import convert

__version__ = "0.1.0"

_LAZY = {"convert": "attnres.models", "generate": "attnres.evals.generate", "record": "attnres.inspect"}
"""What is imported when it is first asked for: it needs Transformers, or NumPy."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnres' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "RESIDUALS",
    "Norm",
    "Residual",
    "UserError",
    "__version__",
    "convert",
    "depth_read",
    "depth_read_reference",
    "generate",
    "make_residual",
    "record",
]
