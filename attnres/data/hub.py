"""Data sets of the Hugging Face hub, streamed: nothing but what is read is downloaded."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from attnres.cache import cache_dir
from attnres.data.readers import field_of
from attnres.errors import UserError
from attnres.files import write_text
from attnres.hub import dataset_rows, streamed_rows

# short name -> repository and configuration
HUB = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", None),
    "wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
_CONFIGURATION = dict(HUB.values())  # of a repository given by its full name: not all of FineWeb-Edu, unasked
_TITLE = re.compile(r"^ = [^=].*[^=] = \n?$")


def resolve(spec: str) -> tuple[str, str | None, str]:
    """`hub:NAME[:CONFIG[:SPLIT]]` -> (repository, configuration or None, split). NAME may be a key of `HUB`.

    The repositories of `HUB` have the configuration given there unless another is named.

    >>> resolve("hub:fineweb-edu")
    ('HuggingFaceFW/fineweb-edu', 'sample-10BT', 'train')
    >>> resolve("hub:HuggingFaceFW/fineweb-edu:default")
    ('HuggingFaceFW/fineweb-edu', 'default', 'train')
    >>> resolve("hub:me/corpus::validation")
    ('me/corpus', None, 'validation')
    """
    name, _, rest = spec.removeprefix("hub:").partition(":")
    config, _, split = rest.partition(":")
    if not name or ":" in split:
        raise UserError(f"source '{spec}' is not hub:NAME[:CONFIG[:SPLIT]], for example hub:fineweb-edu")
    repository = HUB[name][0] if name in HUB else name
    return repository, config or _CONFIGURATION.get(repository), split or "train"


def revision_of(repository: str) -> str | None:
    """The commit that a data set is at on the hub; without a connection the one that the hub told last, or None."""
    from huggingface_hub import dataset_info

    note = cache_dir() / "hub" / f"{repository.replace('/', '--')}.txt"
    try:
        sha = dataset_info(repository, timeout=10).sha
    except Exception:  # whatever it is, reading the data set says it
        return note.read_text(encoding="utf-8") if note.is_file() else None
    with suppress(UserError):
        write_text(note, sha or "")
    return sha


def read_hub(spec: str, column: str, revision: str | None = None) -> Iterator[str]:
    """The rows of a hub data set in its own order; WikiText's rows are lines, and are joined to articles.

    Raises:
        UserError: see `dataset_rows`; or there is no such column.
    """
    repository, config, split = resolve(spec)
    what = f"source '{spec}'"
    rows = dataset_rows(what, repository, config, split, streaming=True, revision=revision)
    texts = (text for row in rows for text in field_of(row, what, column))
    return articles(texts) if joins(repository) else texts


def joins(repository: str) -> bool:
    """Whether the rows of a data set are lines, to be joined."""
    return repository == HUB["wikitext"][0]


def read_hub_from(
    spec: str, column: str, revision: str | None, place: dict[str, Any] | None
) -> tuple[Iterator[str], Callable[[], dict[str, Any]]]:
    """The rows of a hub data set, as they are, from a place on; and a function that says the place after the last one.

    Raises:
        UserError: as for `read_hub`.
    """
    what = f"source '{spec}'"
    rows, where = streamed_rows(what, *resolve(spec), revision, place)
    return (text for row in rows for text in field_of(row, what, column)), where


def articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines joined to articles, each starting at a title of the first level, ` = Title = `."""
    article: list[str] = []
    for line in lines:
        if _TITLE.match(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)
