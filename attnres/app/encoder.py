"""A text in the tokens of a model: their ids, where in the text each lies, and what the tokenizer makes none of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres.app.state import MAX_CHARACTERS
from attnres.errors import UserError
from attnres.models.encoding import check_length, encode_prompt


@dataclass(frozen=True)
class Encoder:
    """A model's tokenizer.

    Attributes:
        name: the model's, for messages.
        context: tokens that a text may have.
        rows: of the model's embedding; None where its config does not say.
    """

    tokenizer: Any
    name: str
    context: int
    rows: int | None

    def encode(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a text's tokens, and where in it each lies (nothing for a tokenizer that does not say).

        Raises:
            UserError: no text, too long a text, or as `encode_prompt`.
        """
        if not text.strip():
            raise UserError("there is no text: type some, or take an example")
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the text has {len(text):,} characters and this page takes {MAX_CHARACTERS:,}: shorten it")
        ids, offsets = encode_prompt(self.tokenizer, text, rows=self.rows, context=None, name=self.name)
        check_length(len(ids), self.context, f"{self.name} on this page")
        return tuple(ids), offsets

    def beginning(self, text: str) -> str:
        """As much of a text as the model takes here, to the end of a line or word where one ends; all of one that its
        tokenizer cannot encode, of which `encode` says so."""
        try:
            spans = encode_prompt(self.tokenizer, text, rows=None, context=None)[1]
        except UserError:
            return text
        if len(spans) <= self.context:
            return text
        cut = text[: spans[self.context - 1][1]]
        return next((cut[:place] for mark in "\n " if (place := cut.rfind(mark)) > 0), cut)

    def token_at(self, text: str, character: int) -> int | None:
        """The number of the token of a text in which a character lies; None where the tokenizer does not say."""
        spans = self.encode(text)[1]
        return next((i for i, (start, end) in enumerate(spans) if start <= character < end), None)

    def end_of(self, text: str, token: int) -> int | None:
        """The last character of a token of a text; None where the tokenizer does not say, or the token has none."""
        start, end = next(iter(self.encode(text)[1][token : token + 1]), (0, 0))
        return end - 1 if end > start else None

    def notes(self, text: str, ids: Sequence[int]) -> list[str]:
        """What a reader of a text's figures has to know of its tokens, in sentences."""
        notes = []
        decoded = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        lost = sorted({character for character in text if not character.isspace()} - set(decoded))
        if self.tokenizer.unk_token_id in ids or (lost and not set(text.lower()) <= set(decoded.lower())):
            some = " ".join(lost[:5])
            which = f" ({some}{' ...' if len(lost) > 5 else ''})" if lost else ""
            notes.append(f"The tokenizer of {self.name} has never seen some characters of this text{which}.")
        if len(ids) == 1:
            notes.append("One token: it has a next-token distribution, but no loss.")
        return notes
