"""What depth attention does, seen from inside a running model, and what happens when it is changed."""

from typing import TYPE_CHECKING

from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.edits import AddLogit, KnockOut, Pin, Recency, Swap, Uniform, pin_from
from attnres.inspect.effects import Effect, effect, predict
from attnres.inspect.intervene import intervene, source_names
from attnres.inspect.record import Trace, find_residual, record
from attnres.inspect.survey import CorpusEffect, corpus_effect
from attnres.lazy import lazy_names

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection
    from attnres.inspect.inspector import inspect_model
    from attnres.inspect.prune import PruneReport, prune_report
else:  # these need Transformers
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Inspection": "attnres.inspect.inspection",
            "inspect_model": "attnres.inspect.inspector",
            "PruneReport": "attnres.inspect.prune",
            "prune_report": "attnres.inspect.prune",
        },
    )

__all__ = [
    "AddLogit",
    "Attribution",
    "CorpusEffect",
    "Effect",
    "Inspection",
    "KnockOut",
    "Pin",
    "PruneReport",
    "Recency",
    "Swap",
    "Trace",
    "Uniform",
    "attribute",
    "corpus_effect",
    "effect",
    "find_residual",
    "inspect_model",
    "intervene",
    "pin_from",
    "predict",
    "prune_report",
    "record",
    "source_names",
]
