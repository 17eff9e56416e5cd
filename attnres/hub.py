"""Access the Hugging Face hub: names, the files of a model, and the rows of a data set."""

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnres.errors import UserError, first_line, install, require

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_name(text: str) -> bool:
    """Return whether `text` has the form of a name on the hub: NAME or OWNER/NAME.

    >>> is_hub_name("gpt2"), is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("runs/mine/model"), is_hub_name("./gpt2")
    (True, True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def fetch(name: str, patterns: Iterable[str]) -> Path:
    """Fetch the files of a model that match `patterns` and are not in the hub's cache; return its folder.

    Raises:
        UserError: no such model, one that needs permission, or no connection.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # connections, missing repositories and gated ones raise many kinds
        raise UserError(
            f"'{name}' is no folder here and cannot be fetched from the hub ({first_line(error)}): check the path, the "
            "name and the connection"
        ) from error


def dataset_rows(
    what: str, repository: str, config: str | None, split: str, *, otherwise: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set, using the library `datasets`.

    Args:
        what: the thing that is read, for messages; `otherwise`: what else the user can do.

    Raises:
        UserError: `datasets` is not installed, or the data set cannot be read.
    """
    with _reading(what, repository, otherwise) as datasets:
        yield from datasets.load_dataset(repository, config, split=split)


def streamed_rows(
    what: str, repository: str, config: str | None, split: str, revision: str | None, place: dict[str, Any] | None
) -> tuple[Iterator[dict[str, Any]], Callable[[], dict[str, Any]]]:
    """Return an iterator over a data set's rows, from a place on, fetched as they are read; and a function that returns
    the place after the last row.

    Raises:
        UserError: as for `dataset_rows`, here or when a row is read.
    """
    with _reading(what, repository, "") as datasets:
        rows = datasets.load_dataset(repository, config, split=split, streaming=True, revision=revision)
        if place is not None:
            rows.load_state_dict(place)

    def guarded() -> Iterator[dict[str, Any]]:
        with _reading(what, repository, ""):
            yield from rows

    return guarded(), lambda: rows.state_dict()


@contextmanager
def _reading(what: str, repository: str, otherwise: str) -> Generator[Any]:
    """Give the library `datasets`, and raise its errors as a UserError."""
    datasets = require("datasets", f"{what} needs the library datasets: {install('data')}{otherwise}")
    try:
        yield datasets
    except Exception as error:  # the library, its readers and its connections raise many kinds
        raise UserError(
            f"{what} cannot be read from {repository} on the hub ({first_line(error)}): check the name, the "
            f"configuration, the split and the connection{otherwise}"
        ) from error
