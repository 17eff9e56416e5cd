"""What a token says, in letters."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from attnres.models.encoding import Offsets

SPACE = "▁"
"""As SentencePiece spells it."""


def piece(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    r"""What a token says on its own, with the space at its front that SentencePiece's decoders take from a text's first
    token; bytes that are no whole character as \xc3."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    spelling = str(tokenizer.convert_ids_to_tokens(token))
    if "\ufffd" in text:
        data = bytes_of(spelling)
        return text if data is None else data.decode(errors="backslashreplace")
    spaces = len(spelling) - len(spelling.lstrip(SPACE))
    return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text


def pieces(tokenizer: "PreTrainedTokenizerBase", ids: "Sequence[int]", text: str, offsets: "Offsets") -> list[str]:
    """What each token of `text` says: the characters at its offsets, which keep the spaces that some tokenizers drop,
    or `piece` where they are not its own, as with tokens that share a character."""
    token_spans = list(offsets[: len(ids)]) or [(0, 0)] * len(ids)
    spans = [(0, 0), *token_spans, (len(text), len(text))]
    alone = [
        before[1] <= start < end <= after[0]
        for before, (start, end), after in zip(spans, spans[1:], spans[2:], strict=False)
    ]
    return [
        text[start:end] if whole else piece(tokenizer, token)
        for token, (start, end), whole in zip(ids, token_spans, alone, strict=True)
    ]


def characters(
    tokenizer: "PreTrainedTokenizerBase", ids: "Sequence[int]", text: str, offsets: "Offsets"
) -> tuple[list[str], list[str]]:
    """What tokens say in whole characters, and a name for each: what several tokens spell together stands at the first
    of them, nothing at the others, whose names say which of how many they are: "漢 (2 of 3)"."""
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
        whole = text[start:end] if end > start else piece(tokenizer, ids[first])
        shown += [whole, *[""] * (count - 1)]
        names += [whole] if count == 1 else [f"{whole} ({place + 1} of {count})" for place in range(count)]
        first = last
    return shown, names


def spelled(text: str) -> str:
    r"""What a token says on one line: \n for a line's end, \\ for a backslash, \xc3 for a byte of a character."""
    return repr(text)[1:-1].replace(r"\\x", r"\x")


def bytes_of(token: str) -> bytes | None:
    """Of a token's own spelling: "<0xC3>", or one letter a byte as byte-level BPE writes it, which keeps the printable
    ones of Latin-1 and counts the others on from 256 (Radford et al. 2019); None for another spelling."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = kept + [byte for byte in range(256) if byte not in kept]
    letters = {chr(byte if i < len(kept) else 256 + i - len(kept)): byte for i, byte in enumerate(order)}
    return bytes(letters[c] for c in token) if set(token) <= letters.keys() else None
