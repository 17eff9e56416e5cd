"""The model, the text and the prediction that a command looks at, and in what windows it reads the text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.data.shards import decoded, prepared_folder, read_header
from attnres.data.sources import open_source
from attnres.errors import UserError
from attnres.evals.scoring import LOGIT_BYTES
from attnres.files import user_path
from attnres.inspect.config import InspectConfig, LookConfig
from attnres.inspect.edits import position_of
from attnres.inspect.survey import encode
from attnres.models.encoding import check_text, piece, token_in_front
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.progress import say
from attnres.reading import read_json, read_text
from attnres.text import visible
from attnres.training.records import ADVICE, RunConfig
from attnres.typed import checked

LARGEST_WINDOW = 2048
"""Tokens in a window where none is given: attention over more costs more than it shows."""


@dataclass(frozen=True)
class LookText:
    """What is looked at: documents that can be read several times, and their name; a text of the user's is `alone`."""

    name: str
    read: Callable[[], Iterator[str]]
    alone: str | None = None


def open_residual(config: LookConfig, model: str) -> tuple[Checkpoint, str]:
    """Open a model with a residual of this package; return it and the residual's name. Raises UserError."""
    checkpoint = open_checkpoint(model, trust_remote_code=config.trust_remote_code)
    if checkpoint.residual is None:
        raise UserError(
            f"{model} is a plain {checkpoint.config.model_type} model without depth reads: give one of attnres, or "
            "make it one with attnres convert"
        )
    return checkpoint, checkpoint.residual


def text_of(config: LookConfig, run: Path | None) -> LookText:
    """Return the text or corpus that the options name, by default the run's training data. Raises UserError."""
    options = [name for name in ("text", "file", "corpus") if getattr(config, name) is not None]
    if len(options) > 1:
        raise UserError(f"both --{options[0]} and --{options[1]} are given: give one of them")
    if config.limit < 2:
        raise UserError(f"limit is {config.limit} tokens: expected at least 2, one to predict another")
    if config.text is not None:
        return _alone("the text", config.text)
    if config.file is not None:
        path = user_path(config.file)
        if path.is_dir():
            raise UserError(f"{path} is a folder: give a text file; a folder of texts is a --corpus")
        return _alone(config.file, read_text(path))
    spec, column = config.corpus, config.column
    if spec is None and run is not None:
        data = checked(read_json(run / "config.json"), RunConfig, run / "config.json", ADVICE).get("data", {})
        spec, column = data.get("source"), data.get("column", column)
    if spec is None:
        raise UserError("there is no text to look at: give --text TEXT, --file FILE or --corpus SOURCE")
    return corpus_text(spec, column)


def corpus_text(spec: str, column: str) -> LookText:
    """Return the documents of a source, or of prepared data; a line on stderr says which files of a folder are read.

    Raises:
        UserError: there are none.
    """
    if (folder := prepared_folder(spec)) is not None:
        read_header(folder)
        return LookText(spec, lambda: decoded(folder))
    source = open_source(spec, column=column)
    for line in source.files:
        say(Console(stderr=True), line)
    return LookText(source.name, source.read)


def _alone(name: str, text: str) -> LookText:
    check_text(text, name)
    if text.isspace():
        raise UserError(f"{name} is empty: expected some text, at least two tokens")
    return LookText(name, lambda: iter([text]), text)


def context_of(config: LookConfig, checkpoint: Checkpoint) -> int:
    """Return the tokens of a window. Raises UserError for more than the model takes."""
    if config.context is None:
        return min(checkpoint.context, LARGEST_WINDOW)
    if not 2 <= config.context <= checkpoint.context:
        raise UserError(f"context is {config.context} tokens: expected 2 to {checkpoint.context:,}, the model's own")
    return config.context


def batch_size_of(batch_tokens: int, checkpoint: Checkpoint, context: int) -> int:
    """Return how many windows go through the model at once: about so many tokens, and no more logits than memory is
    for."""
    if batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}: expected at least 1")
    return max(1, min(batch_tokens // context, LOGIT_BYTES // (context * (checkpoint.vocab_size or 1) * 4)))


@dataclass(frozen=True)
class PredictionTarget:
    """The token and position that --position, --target and --against name.

    Attributes:
        ids: of the text, with the tokens that the tokenizer puts in front; of a longer text than the model takes a part
            that holds the position and the token that follows. position: in `ids`.
        batch_size: copies of the text in one forward pass.
    """

    tokenizer: Any
    ids: list[int]
    position: int
    target: str | None
    against: str | None
    batch_size: int

    @classmethod
    def of(cls, tokenizer: Any, text: str, context: int, config: InspectConfig) -> "PredictionTarget":
        """Return the target that the options name. Raises UserError for a position that the text does not have."""
        front, ids = token_in_front(tokenizer), encode(tokenizer, text).ids.tolist()
        place = position_of(config.position, len(ids))
        room = context - len(front)
        start = max(0, min(place + 2, len(ids)) - room)
        ids = [*front, *ids[start : start + room]]
        size = max(1, config.batch_tokens // len(ids))
        return cls(tokenizer, ids, len(front) + place - start, config.target, config.against, size)

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of `attribute`, `patch` and `circuit` for it."""
        return {name: getattr(self, name) for name in ("position", "target", "against", "batch_size")}

    def word(self, token: int) -> str:
        """Return a token in quotation marks."""
        return f"“{visible(piece(self.tokenizer, token))}”"

    def what(self, target: int, against: int | None) -> str:
        """Return the name of the measured number."""
        less = "" if against is None else f" less that of {self.word(against)}"
        return f"ln p of {self.word(target)}{less} after {self.word(self.ids[self.position])}"
