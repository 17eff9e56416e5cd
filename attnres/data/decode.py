"""Token shards -> text again, for those who look at words."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from attnres.data.shards import SPLITS, open_tokens
from attnres.data.tokenizer import load_tokenizer


def decoded(folder: Path) -> Iterator[str]:
    """Yield the documents of a prepared folder, the held-out ones first; without the ids that close them.

    Raises:
        UserError: its files are missing, truncated, changed, or of another tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    for split in reversed(SPLITS):
        tokens = open_tokens(folder, split)
        for start, stop in pairwise([*tokens.document_starts().tolist(), len(tokens)]):
            yield tokenizer.decode(tokens[start : stop - 1].tolist())
