"""`attnres figures`: figures of models and runs."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from attnres.errors import UserError
from attnres.flags import fields_of, parse
from attnres.inspect.config import LookConfig


@dataclass
class Figures(LookConfig):
    """Write the figures of models, runs or saved inspections: attnres figures MODEL [MORE ...] OUT/.

    Several are also compared side by side, each in a folder of its own. A model is inspected first (attnres inspect).
    """

    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ... OUT")]
    """Run folders, folders of runs, model folders, hub names, files of attnres inspect; last the folder to write."""
    formats: tuple[str, ...] = ("pdf", "png")
    """File formats: pdf, png, svg."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("figures", Figures, arguments)
    if len(options.paths) < 2:
        raise UserError("expected attnres figures MODEL [MORE ...] OUT: a model, run or inspection, then a folder")

    from attnres.figures.draw import draw

    draw(options.paths[:-1], options.paths[-1], options.formats, fields_of(options, only=LookConfig), options.by)
