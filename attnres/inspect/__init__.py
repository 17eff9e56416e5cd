"""What depth attention does, seen from inside a running model, and what happens when it is changed."""

from .attribution import Attribution, attribute
from .edits import AddLogit, KnockOut, Pin, Recency, Swap, Uniform, pin_from
from .effects import CorpusEffect, Effect, corpus_effect, effect, predict
from .intervene import intervene, source_names
from .record import Trace, find_residual, read_names, record

__all__ = [
    "AddLogit",
    "Attribution",
    "CorpusEffect",
    "Effect",
    "KnockOut",
    "Pin",
    "Recency",
    "Swap",
    "Trace",
    "Uniform",
    "attribute",
    "corpus_effect",
    "effect",
    "find_residual",
    "intervene",
    "pin_from",
    "predict",
    "read_names",
    "record",
    "source_names",
]
