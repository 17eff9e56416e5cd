"""`attnres search`: the tokens at which a source is most of a read."""

from attnres.flags import parse
from attnres.inspect.config import SearchConfig


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("search", SearchConfig, arguments)

    from attnres.inspect.corpus import find_tokens

    find_tokens(options)
