"""What depth attention does, seen from inside a running model, and what happens when it is changed."""

from typing import TYPE_CHECKING

from attnres.imports import lazy_names

if TYPE_CHECKING:
    from attnres.inspect.attention import TokenAttention, token_attention
    from attnres.inspect.attribution import Attribution, attribute
    from attnres.inspect.circuits import Circuit, circuit
    from attnres.inspect.corpus import Search, search
    from attnres.inspect.doctor import Finding, examine
    from attnres.inspect.edits import Ablate, Patch, Reweigh, Steer, intervene, source_names
    from attnres.inspect.effects import Effect, Vectors, effect, predict, read_vectors
    from attnres.inspect.inspection import Inspection
    from attnres.inspect.inspector import from_trace, inspect_model
    from attnres.inspect.lens import Direct, Lens, direct, logit_lens
    from attnres.inspect.patching import Patching, patch
    from attnres.inspect.prune import PruneReport, prune_report
    from attnres.inspect.recording import Trace, find_residual, record
    from attnres.inspect.subject import TextModel
    from attnres.inspect.survey import CorpusEffect, corpus_effect

_HOMES = {
    "attention": "TokenAttention token_attention",
    "attribution": "Attribution attribute",
    "circuits": "Circuit circuit",
    "corpus": "Search search",
    "doctor": "Finding examine",
    "edits": "Ablate Patch Reweigh Steer intervene source_names",
    "effects": "Effect Vectors effect predict read_vectors",
    "inspection": "Inspection",
    "inspector": "from_trace inspect_model",
    "lens": "Direct Lens direct logit_lens",
    "patching": "Patching patch",
    "prune": "PruneReport prune_report",
    "recording": "Trace find_residual record",
    "subject": "TextModel",
    "survey": "CorpusEffect corpus_effect",
}
"""Names by the module that defines them. They are imported when asked for: flags need none of it."""
__getattr__, __dir__ = lazy_names(
    __name__,
    {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names.split()},
)

__all__ = [
    "Ablate",
    "Attribution",
    "Circuit",
    "CorpusEffect",
    "Direct",
    "Effect",
    "Finding",
    "Inspection",
    "Lens",
    "Patch",
    "Patching",
    "PruneReport",
    "Reweigh",
    "Search",
    "Steer",
    "TextModel",
    "TokenAttention",
    "Trace",
    "Vectors",
    "attribute",
    "circuit",
    "corpus_effect",
    "direct",
    "effect",
    "examine",
    "find_residual",
    "from_trace",
    "inspect_model",
    "intervene",
    "logit_lens",
    "patch",
    "predict",
    "prune_report",
    "read_vectors",
    "record",
    "search",
    "source_names",
    "token_attention",
]
