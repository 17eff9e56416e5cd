"""What tokens say: characters, and bytes where a token is no whole character."""

import pytest

from attnres.inspect.pieces import bytes_of, piece, pieces, spelled
from attnres.inspect.survey import encode


@pytest.mark.parametrize("text", ["Grüße 漢字 🙂\n", "plain text", " a\ufffd", ""])
def test_pieces_say_every_byte_once(tokenizer, text):
    encoded = encode(tokenizer, text)
    texts = pieces(tokenizer, encoded.ids.tolist(), text, encoded.offsets)
    data = b"".join(
        bytes.fromhex(part[2:].replace("\\x", "")) if part.startswith("\\x") else part.encode() for part in texts
    )
    assert data.decode() == text


def test_a_character_of_several_tokens_is_shown_as_its_bytes(tokenizer):
    encoded = encode(tokenizer, "a漢b")
    texts = pieces(tokenizer, encoded.ids.tolist(), "a漢b", encoded.offsets)
    assert texts == ["a", "\\xe6", "\\xbc", "\\xa2", "b"]
    assert [piece(tokenizer, token) for token in encoded.ids.tolist()] == texts


def test_without_offsets_tokens_are_decoded_one_by_one(tokenizer):
    encoded = encode(tokenizer, "ab c")
    ids = encoded.ids.tolist()
    assert pieces(tokenizer, ids, "ab c", []) == [piece(tokenizer, token) for token in ids]


def test_spellings_of_bytes():
    assert bytes_of("<0x0A>") == b"\n" and bytes_of("ĠÃ") == b" \xc3" and bytes_of("漢") is None


def test_a_token_is_spelled_on_one_line():
    assert [spelled(said) for said in ("\n", "a\\n", "\\xe6", " b")] == [r"\n", r"a\\n", r"\xe6", " b"]
