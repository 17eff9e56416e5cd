"""Text -> tokens -> batches.

info = prepare("stdlib", "bpe:4096")
batches = Batches(info.tokens("train"), seq_len=256, batch_size=8, seed=0)
inputs, targets = batches.at(step)
"""

from typing import TYPE_CHECKING

from attnres.imports import lazy_names

if TYPE_CHECKING:
    from attnres.data.batches import Batches, held_out_windows
    from attnres.data.build import Prepared, prepare
    from attnres.data.shards import Tokens, open_tokens, read_header
    from attnres.data.sources import open_source
    from attnres.data.tokenizer import load_tokenizer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Batches": "attnres.data.batches",
            "Prepared": "attnres.data.build",
            "Tokens": "attnres.data.shards",
            "held_out_windows": "attnres.data.batches",
            "load_tokenizer": "attnres.data.tokenizer",
            "open_source": "attnres.data.sources",
            "open_tokens": "attnres.data.shards",
            "prepare": "attnres.data.build",
            "read_header": "attnres.data.shards",
        },
    )

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
