"""`attnres inspect`: where every read of a model comes from."""

from attnres.flags import parse
from attnres.inspect.config import InspectConfig


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("inspect", InspectConfig, arguments)

    from attnres.inspect.look import look

    look(options)
