"""What depth attention does, seen from inside a running model, and what happens when it is changed."""

import importlib
from typing import TYPE_CHECKING, Any

from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.edits import AddLogit, KnockOut, Pin, Recency, Swap, Uniform, pin_from
from attnres.inspect.effects import CorpusEffect, Effect, corpus_effect, effect, predict
from attnres.inspect.intervene import intervene, source_names
from attnres.inspect.record import Trace, find_residual, read_names, record

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection, inspect_model
    from attnres.inspect.prune import PruneReport, prune_report

_LAZY = {"Inspection": "inspection", "inspect_model": "inspection", "PruneReport": "prune", "prune_report": "prune"}
"""What is imported when it is first asked for: it needs Transformers."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnres.inspect' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


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
    "read_names",
    "record",
    "source_names",
]
