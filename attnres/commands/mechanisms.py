"""`attnres mechanisms`: list the residual mechanisms."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from attnres.flags import parse
from attnres.text import settings_text


@dataclass
class Mechanisms:
    """Print the residual mechanisms: rule, start values, parameters, cost, and what is published about each."""

    names: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Show these at length, with their settings; none is a table of all."""
    format: Literal["text", "markdown", "json"] = "text"
    """Output format."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("mechanisms", Mechanisms, arguments, doing="importing PyTorch")

    import inspect
    import json

    from attnres.residuals import residual_class, settings_of
    from attnres.residuals.table import SUBLAYERS, WIDTH, as_markdown, mechanisms

    names = [residual_class(name).name for name in options.names]
    rows = mechanisms(names)
    if options.format == "json":
        print(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    if options.format == "markdown":
        print(as_markdown(rows))
        return
    if names:
        for row in rows:
            settings = settings_text(settings_of(row.name)) or "none"
            print(f"{row.name}\n\n{inspect.cleandoc(residual_class(row.name).__doc__ or 'it has no docstring')}\n")
            print(f"settings: {settings}\nparameters: {row.parameters:,} at L={SUBLAYERS}, d={WIDTH}")
            print(f"source: {row.source or 'not said'}\nevidence: {row.evidence or 'docs/results'}\n")
        return

    from rich.table import Table

    from attnres.progress import wide

    title = f"Residual mechanisms (parameters at L={SUBLAYERS} sublayers, d={WIDTH})"
    table = Table("mechanism", "rule", "start", "parameters", "linear", "= standard at start", title=title)
    for row in rows:
        marks = ["yes" if value else "no" for value in (row.linear, row.starts_standard)]
        table.add_row(row.name, row.rule, row.start, f"{row.parameters:,}", *marks)
    wide().print(table)
    print("attnres mechanisms NAME shows one at length, with settings and source; --format markdown adds costs.")
