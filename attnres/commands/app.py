"""`attnres app`: the explorer in the browser."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from attnres.flags import parse
from attnres.inspect.config import CorpusConfig


@dataclass
class App(CorpusConfig):
    """Look into one or two models in the browser: what every token reads, and the prediction after an ablation.

    With --corpus the page can search that text.
    """

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL [MODEL2]]")] = ()
    """Run folders, model folders or hub names, at most two; none opens the demo's Block and Full in runs/demo. The
    checkpoints that a run kept (--keep-at) can be chosen too."""
    host: str = "127.0.0.1"
    """Address to serve on; 127.0.0.1 is this machine alone. Anyone who can reach another address can use the models."""
    port: int = 7860
    """Port to serve on."""
    names: tuple[str, ...] = ()
    """With --host: other host names that requests may have, such as a proxy's or a container's."""
    open: bool = False
    """Open the page in a browser."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("app", App, arguments)

    from attnres.app import serve

    serve(
        options.models,
        corpus=options.corpus,
        column=options.column,
        host=options.host,
        port=options.port,
        names=options.names,
        browser=options.open,
        trust_remote_code=options.trust_remote_code,
    )
