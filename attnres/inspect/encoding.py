"""A text as tokens: their ids, and where in the text each lies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnres.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Offsets = Sequence[tuple[int, int]]
"""Of each token its characters [start, end) of the text."""


def tokenised(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, special: bool = True
) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a text's tokens, and where each lies: `with_space`, nothing for a tokenizer that does not say.

    Args:
        special: with the tokens that the tokenizer puts around a text, which have no characters.

    Raises:
        UserError: the tokenizer fails on it, as one without a token for the unknown may.
    """
    fast = tokenizer.is_fast
    try:
        encoding: Any = tokenizer(text, add_special_tokens=special, return_offsets_mapping=fast, verbose=False)
    except Exception as error:  # the Rust library raises plain Exceptions
        raise UserError(
            f"the tokenizer cannot encode the text ({first_line(error)}): remove what it does not know"
        ) from error
    return list(encoding["input_ids"]), with_space(text, encoding["offset_mapping"]) if fast else []


def with_space(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Offsets in which a token has the white space before it, too: some tokenizers leave it out, and tokens of white
    space alone are then empty.

    >>> with_space("a b", [(0, 1), (2, 3)])
    [(0, 1), (1, 3)]
    """
    spans, last = [], 0
    for start, end in offsets:
        spans.append((last if text[last:start].isspace() else start, end))
        last = max(last, end)
    return spans
