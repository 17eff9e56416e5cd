"""How long a text a model takes, by its config and tokenizer."""

from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from attnres.errors import UserError

DEFAULT_CONTEXT = 2048
"""Tokens, where neither config nor tokenizer says how long a text may be; lm-eval assumes the same."""


def context_of(config: Any, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The longest sequence in tokens, as lm-eval finds it (0.4.13, `resolve_max_length`)."""
    stated = stated_context(config)
    if stated is not None:
        return stated
    longest = getattr(tokenizer, "model_max_length", VERY_LARGE_INTEGER)  # by which Transformers means "unknown"
    return _length(longest, "model_max_length") if longest != VERY_LARGE_INTEGER else DEFAULT_CONTEXT


def stated_context(config: Any) -> int | None:
    """The longest sequence in tokens that the config names; None where it names none."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        value = getattr(text_config(config), name, None)
        if value is not None:
            return _length(value, name)
    return None


def _length(value: Any, name: str) -> int:
    if type(value) not in (int, float) or not 1 <= value < 2**62:
        raise UserError(f"the model's {name} is {value!r}: expected a number of tokens, 1 or more")
    return int(value)


def text_config(config: Any) -> Any:
    """The config of the part that is a language model; itself where it has no parts."""
    return getattr(config, "text_config", None) or config
