"""What tokens say: characters, and bytes where a token is no whole character."""

import pytest
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from attnres.inspect.kinds import kinds_of
from attnres.inspect.survey import encode
from attnres.models.encoding import bytes_of, encode_prompt, piece, pieces


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


@pytest.mark.parametrize("text", ["the quick  brown fox   \n\n    lazy  ", "漢  字\n x", "  x"])
def test_white_space_that_a_tokenizer_leaves_out_of_offsets_is_counted_in(tokenizer, text):
    """As GPT-NeoX' does; the same tokenizer that leaves nothing out says where tokens lie."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    trimming = PreTrainedTokenizerFast(tokenizer_object=backend)
    left_out = trimming(text, return_offsets_mapping=True)["offset_mapping"]
    mine, theirs = encode(trimming, text), encode(tokenizer, text)
    assert mine.ids.tolist() == theirs.ids.tolist() and mine.offsets == theirs.offsets != left_out
    assert -1 not in kinds_of(text, mine.offsets, "prose")


def test_special_tokens_have_no_characters(tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    name, number = tokenizer.bos_token, tokenizer.bos_token_id
    backend.post_processor = processors.TemplateProcessing(f"{name} $A", special_tokens=[(name, number)])
    begun = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=name)
    ids, offsets = encode_prompt(begun, " the", rows=None, context=None)
    assert ids[0] == number and offsets[0] == (0, 0) and offsets[1][0] == 0 and len(offsets) == len(ids)


def test_without_offsets_tokens_are_decoded_one_by_one(tokenizer):
    encoded = encode(tokenizer, "ab c")
    ids = encoded.ids.tolist()
    assert pieces(tokenizer, ids, "ab c", []) == [piece(tokenizer, token) for token in ids]


@pytest.mark.parametrize("decoder", ["metaspace", "llama"])
def test_a_token_keeps_the_space_at_its_front(decoder):
    """Which both decoders take from the first token of a text: alone every token is that."""
    said = [" the", "the", " ", "   ", " \n"]
    backend = Tokenizer(Unigram([("<unk>", 0.0), *((one.replace(" ", "▁"), -1.0) for one in said)], 0))
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Metaspace() if decoder == "metaspace" else decoders.Sequence(steps)
    spelling = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert spelling.decode([1]) == spelling.decode([2]) == "the"
    assert [piece(spelling, token) for token in range(1, 6)] == said


def test_spellings_of_bytes():
    assert bytes_of("<0x0A>") == b"\n" and bytes_of("ĠÃ") == b" \xc3" and bytes_of("漢") is None
