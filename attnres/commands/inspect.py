"""`attnres inspect`: where every read of a model comes from."""

from attnres.analysis.config import InspectConfig
from attnres.flags import parse


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("inspect", InspectConfig, arguments)

    from attnres.analysis.look import look

    look(options)
