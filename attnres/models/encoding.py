"""Encode a text as token ids, by one rule for every command and function that gives a model a text.

    characters     a text without characters, or with half a one, is refused; a byte order mark belongs to the file
                   (`attnres.reading.read_text`)
    in front       the tokens that the tokenizer puts in front of a text stand there once, also if the text brings its
                   own, as one from a chat template does; they begin each window of a document
    at the end     a token that ends the text is left out, because the model continues the text
    ids            ids outside the embedding are refused
    length         a text longer than the context is refused
    chat           a template writes all special tokens of its turns itself

Log-probabilities of continuations follow lm-eval's rule instead (`attnres.evals.scoring.encode_pairs`).
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from attnres.errors import UserError, first_line, foreign
from attnres.typed import is_text

Offsets = Sequence[tuple[int, int]]
"""For each token, its characters [start, end) of the text."""
Tokens = tuple[list[int], list[tuple[int, int]]]
"""The ids of a text's tokens, and the characters of each (`with_space`); empty for a tokenizer that does not tell."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    rows: int | None,
    context: int | None,
    room: int = 0,
    chat: bool = False,
    name: str = "the model",
    what: str = "the text",
) -> Tokens:
    """Return the tokens of a text that a model is given whole, with those that the tokenizer puts in front.

    Args:
        rows: rows of the model's embedding. context: tokens that it takes, of which `room` must stay free. None is
            unknown.
        chat: the text is a user's turn, to be put into the chat template.
        name, what: names of the model and of the text, for messages.

    Raises:
        UserError: no text or no token of it, no chat template, too many tokens, or one that the model does not have.
    """
    check_text(text, what)
    if chat:
        if not tokenizer.chat_template:
            raise UserError(f"the tokenizer of {name} has no chat template: leave out --chat")
        with foreign(f"the chat template of {name} makes no text", "leave out --chat"):
            turns = [{"role": "user", "content": text}]
            text = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        ids, spans = tokenise(tokenizer, text)
    else:
        ids, spans = encode_document(tokenizer, text)
        front = token_in_front(tokenizer)
        ids, spans = [*front, *ids], [*((0, 0) for _ in front if spans), *spans]
    if not ids:
        raise UserError(f"the tokenizer of {name} makes no token of {what}: give one that it can encode")
    check_ids(ids, rows, name)
    check_length(len(ids), context, name, what, room)
    return ids, spans


def encode_document(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    """Return the tokens of a text that is cut into windows, without those in front, which begin each window.

    Raises:
        UserError: as `tokenise`.
    """
    ids, spans = tokenise(tokenizer, text)
    front = token_in_front(tokenizer)
    in_front = len(front) if tuple(ids[: len(front)]) == front else 0
    return ids[in_front:], spans[in_front:]


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    """Return the tokens of the characters of a text, and no others.

    Raises:
        UserError: the tokenizer fails, as one without a token for the unknown may, and each on half a character.
    """
    fast = tokenizer.is_fast
    try:
        encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    except Exception as error:  # the Rust library raises plain Exceptions
        raise UserError(
            f"the tokenizer cannot encode the text ({first_line(error)}): remove characters that it does not know"
        ) from error
    return list(encoding["input_ids"]), with_space(text, encoding["offset_mapping"]) if fast else []


def token_in_front(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts in front of a text, often none, mostly the beginning-of-text token.

    A single added token that is the end-of-text and not also the beginning-of-text token counts as one at the end.
    """
    ids = tuple(tokenizer("")["input_ids"])
    ends = ids[-1:] in ((tokenizer.eos_token_id,), (tokenizer.sep_token_id,))
    return ids[:-1] if ends and ids != (tokenizer.bos_token_id,) else ids


def check_text(text: str, what: str = "the text") -> None:
    """Refuse with a UserError a text without characters, or with half a character."""
    if not text:
        raise UserError(f"{what} is empty: give some characters")
    if not is_text(text):
        raise UserError(f"{what} is not valid UTF-8: expected whole characters")


def check_ids(ids: Any, rows: int | None, name: str = "the model") -> None:
    """Refuse with a UserError token ids outside the embedding; `ids` may be a list, array or tensor."""
    smallest, largest = (int(ids.min()), int(ids.max())) if hasattr(ids, "min") else (min(ids), max(ids))
    if rows is not None and (smallest < 0 or largest >= rows):
        raise UserError(
            f"token id {smallest if smallest < 0 else largest}, and the embedding of {name} has {rows} rows: the "
            "tokenizer belongs to another model, or the embedding was not resized after tokens were added"
        )


def rows_of(model: Any) -> int:
    """Return the number of rows of a model's embedding."""
    table = model.get_input_embeddings()
    return int(getattr(table, "num_embeddings", table.weight.shape[0]))


def check_length(count: int, context: int | None, name: str, what: str = "the text", room: int = 0) -> None:
    """Refuse with a UserError `count` tokens that would leave fewer than `room` of the context free."""
    if context is not None and count + room > context:
        raise UserError(
            f"{what} has {count:,} tokens and {name} takes {context:,}: shorten it{' to leave room' if room else ''}"
        )


def with_space(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Return offsets in which a token includes the white space before it: some tokenizers leave it out, and tokens of
    white space alone are then empty.

    >>> with_space("a b", [(0, 1), (2, 3)])
    [(0, 1), (1, 3)]
    """
    spans, last = [], 0
    for start, end in offsets:
        spans.append((last if text[last:start].isspace() else start, end))
        last = max(last, end)
    return spans


SPACE = "▁"
"""How SentencePiece writes a space."""


def piece(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    r"""Return the text of a single token, with the leading space that SentencePiece's decoders strip from a text's
    first token; bytes that are no whole character as \xc3."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    spelling = str(tokenizer.convert_ids_to_tokens(token))
    if "\ufffd" in text:
        data = bytes_of(spelling)
        return text if data is None else data.decode(errors="backslashreplace")
    spaces = len(spelling) - len(spelling.lstrip(SPACE))
    return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str, offsets: Offsets) -> list[str]:
    """Return the text of each token of `text`: the characters at its offsets, which keep the spaces that some
    tokenizers drop, or `piece` where several tokens share a character."""
    token_spans = list(offsets[: len(ids)]) or [(0, 0)] * len(ids)
    spans = [(0, 0), *token_spans, (len(text), len(text))]
    is_separate = [
        before[1] <= start < end <= after[0]
        for before, (start, end), after in zip(spans, spans[1:], spans[2:], strict=False)
    ]
    return [
        text[start:end] if whole else piece(tokenizer, token)
        for token, (start, end), whole in zip(ids, token_spans, is_separate, strict=True)
    ]


def characters(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str, offsets: Offsets
) -> tuple[list[str], list[str]]:
    """Return the tokens' texts in whole characters, and a name for each. The first of several tokens that share a
    character has it; their names say which of how many they are: "漢 (2 of 3)"."""
    shown: list[str] = []
    names: list[str] = []
    first = 0
    while first < len(ids):
        last = first + 1
        start, end = offsets[first] if offsets else (0, 0)
        while last < len(ids) and offsets and offsets[last][0] < end and offsets[last][1] > offsets[last][0]:
            end = max(end, offsets[last][1])
            last += 1
        count = last - first
        character = text[start:end] if end > start else piece(tokenizer, ids[first])
        shown += [character, *[""] * (count - 1)]
        names += [character] if count == 1 else [f"{character} ({place + 1} of {count})" for place in range(count)]
        first = last
    return shown, names


def bytes_of(token: str) -> bytes | None:
    """Return the bytes of a token's own spelling: "<0xC3>", or one letter a byte as byte-level BPE writes it, which
    keeps the printable ones of Latin-1 and counts the others on from 256 (Radford et al. 2019); None for another
    spelling."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte if i < len(printable) else 256 + i - len(printable)): byte for i, byte in enumerate(order)}
    return bytes(letters[c] for c in token) if set(token) <= letters.keys() else None


DEFAULT_CONTEXT = 2048
"""Tokens of context if neither config nor tokenizer gives a number; lm-eval's default."""


def context_of(config: Any, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the longest sequence in tokens, as lm-eval finds it (0.4.13, `resolve_max_length`)."""
    stated = stated_context(config)
    if stated is not None:
        return stated
    longest = getattr(tokenizer, "model_max_length", VERY_LARGE_INTEGER)  # Transformers' value for "unknown"
    return _length(longest, "model_max_length") if longest != VERY_LARGE_INTEGER else DEFAULT_CONTEXT


def stated_context(config: Any) -> int | None:
    """Return the longest sequence in tokens that the config names; None where it names none."""
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
    """Return the config of the language-model part; the config itself if it has no parts."""
    return getattr(config, "text_config", None) or config
