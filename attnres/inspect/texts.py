"""The model and the text that a command looks at, and in what windows it reads them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from attnres.data.shards import decoded, prepared_folder, read_header
from attnres.data.sources import open_source
from attnres.errors import UserError
from attnres.evals.scoring import LOGIT_BYTES
from attnres.files import user_path
from attnres.inspect.config import LookConfig
from attnres.models.encoding import check_text
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.progress import say
from attnres.reading import read_json, read_text
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
    """Return the text or corpus that the options name, else what a run was trained on. Raises UserError."""
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
