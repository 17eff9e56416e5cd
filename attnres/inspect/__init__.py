"""What depth attention does, seen from inside a running model, and what happens when it is changed."""

from typing import TYPE_CHECKING

from attnres.inspect.attention import TokenAttention, token_attention
from attnres.inspect.edits import AddLogit, KnockOut, Patch, Pin, Recency, Steer, Swap, Uniform, pin_from
from attnres.inspect.effects import Effect, effect, predict
from attnres.inspect.intervene import intervene, source_names
from attnres.inspect.record import Trace, find_residual, record
from attnres.inspect.survey import CorpusEffect, corpus_effect
from attnres.inspect.vectors import Vectors, read_vectors
from attnres.lazy import lazy_names

if TYPE_CHECKING:
    from attnres.inspect.attribution import Attribution, attribute
    from attnres.inspect.corpus import Search, search
    from attnres.inspect.inspection import Inspection
    from attnres.inspect.inspector import from_trace, inspect_model
    from attnres.inspect.lens import Direct, Lens, direct, logit_lens
    from attnres.inspect.patching import Patching, patch
    from attnres.inspect.prune import PruneReport, prune_report
else:  # these need Transformers
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Attribution": "attnres.inspect.attribution",
            "attribute": "attnres.inspect.attribution",
            "Inspection": "attnres.inspect.inspection",
            "from_trace": "attnres.inspect.inspector",
            "inspect_model": "attnres.inspect.inspector",
            "Direct": "attnres.inspect.lens",
            "Lens": "attnres.inspect.lens",
            "direct": "attnres.inspect.lens",
            "logit_lens": "attnres.inspect.lens",
            "Search": "attnres.inspect.corpus",
            "Patching": "attnres.inspect.patching",
            "patch": "attnres.inspect.patching",
            "PruneReport": "attnres.inspect.prune",
            "prune_report": "attnres.inspect.prune",
            "search": "attnres.inspect.corpus",
        },
    )

__all__ = [
    "AddLogit",
    "Attribution",
    "CorpusEffect",
    "Direct",
    "Effect",
    "Inspection",
    "KnockOut",
    "Lens",
    "Patch",
    "Patching",
    "Pin",
    "PruneReport",
    "Recency",
    "Search",
    "Steer",
    "Swap",
    "TokenAttention",
    "Trace",
    "Uniform",
    "Vectors",
    "attribute",
    "corpus_effect",
    "direct",
    "effect",
    "find_residual",
    "from_trace",
    "inspect_model",
    "intervene",
    "logit_lens",
    "patch",
    "pin_from",
    "predict",
    "prune_report",
    "read_vectors",
    "record",
    "search",
    "source_names",
    "token_attention",
]
