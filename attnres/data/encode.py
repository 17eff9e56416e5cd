"""Documents to ids, and which of them are held out."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from attnres.errors import foreign


class Encoded(NamedTuple):
    """Some documents.

    Attributes:
        ids: of each, its end-of-text id included, uint32.
        held: whether each is held out.
        size: bytes of their text.
    """

    ids: list[np.ndarray]
    held: list[bool]
    size: int


class Encoder:
    """A tokenizer with what closes a document and which are held out: those whose hash is below `threshold`."""

    def __init__(self, tokenizer: Tokenizer, eos: int, threshold: int) -> None:
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, and ends no document
        self.tokenizer, self.eos, self.threshold = tokenizer, eos, threshold

    @property
    def sign(self) -> str:
        """A hash of all that decides what is made of a text."""
        return hashlib.sha256(f"{self.eos} {self.threshold} {self.tokenizer.to_str()}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> Encoded:
        """Return the documents of some texts. Raises UserError."""
        data = [text.encode() for text in texts]
        with foreign(
            "the tokenizer cannot read the text", "give one that knows every character, or has an unknown token"
        ):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array([*encoding.ids, self.eos], dtype=np.uint32) for encoding in encodings]
        return Encoded(ids, [hash_of(raw) < self.threshold for raw in data], sum(map(len, data)))

    @staticmethod
    def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
        """Give the documents in order, so many that they have `size` characters."""
        batch: list[str] = []
        total = 0
        for text in documents:
            batch.append(text)
            total += len(text)
            if total >= size:
                yield batch
                batch, total = [], 0
        if batch:
            yield batch


def hash_of(data: bytes) -> int:
    """Return the hash of a document's UTF-8 text, below 2^64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
