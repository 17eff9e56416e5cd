"""`attnres report`: table and page of runs on disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from attnres.errors import UserError, unknown
from attnres.files import user_path
from attnres.flags import parse


@dataclass
class Report:
    """Make table.csv, curves.csv and report.html from run folders, finished or not."""

    dirs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUNS ...")]
    """Run folders, or folders of runs as `attnres compare` makes them."""
    out: str | None = None
    """Folder to write them into; none is the folder of runs itself, or report/ here for several."""
    images: str | None = None
    """png or svg: also write every figure as a file of its own."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("report", Report, arguments)
    if not options.dirs:
        raise UserError("no folder given: expected attnres report DIR..., run folders or folders of runs")
    if options.images not in (None, "png", "svg"):
        raise unknown("image format", options.images, ("png", "svg"))
    folders = tuple(user_path(folder) for folder in options.dirs)
    out = user_path(options.out) if options.out else folders[0] if len(folders) == 1 else Path("report")

    from attnres.report.page import show

    show(*folders, out=out, images=options.images)
