"""`attnres generate`: text from a model."""

from attnres.evals.config import GenerateConfig
from attnres.flags import parse


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("generate", GenerateConfig, arguments)

    from attnres.evals.generate import speak

    speak(options)
