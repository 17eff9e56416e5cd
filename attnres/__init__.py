"""Attention Residuals: transformers whose sublayers read a learned softmax over earlier outputs.

`import attnres` is quick: each public name and subpackage is imported at its first use, and `attnres.models` when one
of Transformers' Auto classes meets a model of this package. Reads, residuals and `attach` need only torch; models need
Transformers.
"""

from typing import TYPE_CHECKING

from attnres.imports import find_our_types, lazy_names, when_imported

__version__ = "0.1.0"

HOMES = {
    "DepthReads": "attnres.streams.depth_reads",
    "Interrupted": "attnres.errors",
    "UserError": "attnres.errors",
    "Norm": "attnres.ops",
    "depth_read": "attnres.ops",
    "depth_read_reference": "attnres.ops",
    "RESIDUALS": "attnres.residuals",
    "Residual": "attnres.residuals",
    "compose": "attnres.residuals",
    "make_residual": "attnres.residuals",
    "register": "attnres.residuals",
    "regroup": "attnres.residuals.regroup",
    "attach": "attnres.streams.attach",
    "detach": "attnres.streams.switches",
    "disabled": "attnres.streams.switches",
    "load_plain": "attnres.streams.switches",
    "build": "attnres.models",
    "convert": "attnres.models",
    "load": "attnres.models",
    "TrainConfig": "attnres.training.config",
    "train": "attnres.training.loop",
    "compare": "attnres.comparison.compare",
    "explore": "attnres.app",
    "inspect_model": "attnres.inspect.inspector",
    "intervene": "attnres.inspect",
    "record": "attnres.inspect",
    "generate": "attnres.evals.generate",
}
"""Public name -> the module that defines it."""

if TYPE_CHECKING:  # the same names and the subpackages, for type checkers and editors; a test holds the two lists equal
    from attnres import app as app
    from attnres import data as data
    from attnres import evals as evals
    from attnres import figures as figures
    from attnres import report as report
    from attnres.app import explore
    from attnres.comparison.compare import compare
    from attnres.errors import Interrupted, UserError
    from attnres.evals.generate import generate
    from attnres.inspect import intervene, record
    from attnres.inspect.inspector import inspect_model
    from attnres.models import build, convert, load
    from attnres.ops import Norm, depth_read, depth_read_reference
    from attnres.residuals import RESIDUALS, Residual, compose, make_residual, register
    from attnres.residuals.regroup import regroup
    from attnres.streams.attach import attach
    from attnres.streams.depth_reads import DepthReads
    from attnres.streams.switches import detach, disabled, load_plain
    from attnres.training.config import TrainConfig
    from attnres.training.loop import train
else:
    __getattr__, __dir__ = lazy_names(__name__, HOMES)

when_imported("transformers.models.auto.configuration_auto", find_our_types)

__all__ = [
    "RESIDUALS",
    "DepthReads",
    "Interrupted",
    "Norm",
    "Residual",
    "TrainConfig",
    "UserError",
    "__version__",
    "attach",
    "build",
    "compare",
    "compose",
    "convert",
    "depth_read",
    "depth_read_reference",
    "detach",
    "disabled",
    "explore",
    "generate",
    "inspect_model",
    "intervene",
    "load",
    "load_plain",
    "make_residual",
    "record",
    "register",
    "regroup",
    "train",
]
