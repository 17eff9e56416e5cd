"""Text -> tokens -> batches.

info = prepare("stdlib", "bpe:4096")
batches = Batches(info.tokens("train"), seq_len=256, batch_size=8, seed=0)
inputs, targets = batches.at(step)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnres.data.batches import Batches, held_out_windows
    from attnres.data.build import Prepared, prepare
    from attnres.data.shards import Tokens, open_tokens, read_header
    from attnres.data.sources import open_source
    from attnres.data.tokenizer import load_tokenizer

_HOME = {
    "Batches": "batches",
    "Prepared": "build",
    "Tokens": "shards",
    "held_out_windows": "batches",
    "load_tokenizer": "tokenizer",
    "open_source": "sources",
    "open_tokens": "shards",
    "prepare": "build",
    "read_header": "shards",
}

__all__ = [
    "Batches",
    "Prepared",
    "Tokens",
    "held_out_windows",
    "load_tokenizer",
    "open_source",
    "open_tokens",
    "prepare",
    "read_header",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
