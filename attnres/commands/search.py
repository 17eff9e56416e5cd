"""`attnres search`: the tokens at which a source is most of a read."""

from attnres.analysis.config import SearchConfig
from attnres.flags import parse


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("search", SearchConfig, arguments)

    from attnres.analysis.search import find_tokens

    find_tokens(options)
