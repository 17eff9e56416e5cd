"""Draw the figures of models, runs or saved inspections, for the command `attnres figures`."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnres.errors import UserError, unknown
from attnres.figures import Comparison, draw_comparison, draw_model, save_all, style
from attnres.figures.write import Drawn, check_formats, names_of_figures
from attnres.files import user_path, write_text
from attnres.folders import kind_of, refuse_other
from attnres.inspect.config import InspectConfig
from attnres.inspect.inspection import By, Inspection
from attnres.inspect.look import look
from attnres.progress import say
from attnres.report.runs import load_study
from attnres.report.sections import comparison_of
from attnres.text import listed

WIDTHS, FONTS = (2.0, 20.0), (4, 24)
"""Allowed widths in inches and font sizes in points."""


def draw(
    sources: Sequence[str],
    out: Path | str,
    formats: Sequence[str],
    options: dict[str, object],
    by: By = "contribution",
    only: Sequence[str] = (),
    width: str | None = None,
    font: float | None = None,
) -> list[Path]:
    """Write every figure that applies, and `captions.md`; print the files, and for each other figure why it does not
    apply.

    Args:
        sources: model folders, run folders, folders of runs, hub names, or files of `attnres inspect`. In a folder of
            runs the first seed of each label is inspected; its dynamics are means over seeds.
        out: the folder to write. With several models each has a folder in it; figures that compare them lie in `out`.
        formats: of pdf, png and svg.
        options: fields of `InspectConfig` for sources that are models.
        by: which numbers of sources are shown, contributions or weights.
        only: names of figures; empty is all.
        width: width of every figure, as `inches` reads it; None is that of a column or a page. font: font size in
            points.

    Raises:
        UserError: a source is none of these, `out` is a file or holds a model, a file cannot be written, or no figure
            of `only` applies.
    """
    check_formats(formats)
    for name in only:
        if name not in names_of_figures():
            raise unknown("figure", name, names_of_figures())
    wide = None if width is None else inches(width)
    if font is not None and not FONTS[0] <= font <= FONTS[1]:
        raise UserError(f"font is {font:g} points: expected {FONTS[0]} to {FONTS[1]}")
    if Path(out).suffix == ".json":
        raise UserError(f"the last argument is the folder to write figures into, it is the file {out}")
    out = refuse_other(out, "figures")
    models, studies = _expand(sources)  # before anything is written
    console = Console()
    inspections = [_inspection(name, options) for name in models]
    names = _distinct([str(inspection.model["name"]) for inspection in inspections])
    for inspection, name in zip(inspections, names, strict=True):
        inspection.model["name"] = name
    compared = Comparison.of_models(inspections)
    runs = comparison_of(load_study(*studies)) if studies else Comparison([])
    if studies:  # figures of training are means over all seeds
        compared = compared.without("dynamics")
    with style.style(wide, font):
        alone = [draw_model(inspection, by, only) for inspection in inspections]
        beside = draw_comparison(compared, by, only) + draw_comparison(runs.without("inspections"), by, only)
    every = sum(alone, Drawn()) + beside
    if only and not every.plots:
        reasons = [f"{name} ({reason})" for name, reason in dict(every.left_out).items()]
        raise UserError(f"no figure of --only {' '.join(only)} applies: {listed(reasons or ['it is of runs'])}")
    written = list[Path]()
    if len(inspections) == 1:
        written += write_drawn(console, names[0], every, out, formats)
    else:
        write_text(out / "captions.md", "")  # first: the folder is recognised by it
        folders = _distinct([_file_name(name) for name in names])
        for drawn, name, folder in zip(alone, names, folders, strict=True):
            if drawn.plots or not only:
                written += write_drawn(console, name, drawn, out / folder, formats)
        written += write_drawn(console, "side by side", beside, out, formats)
    say(console, f"{len(written)} files in {out}")
    return written


def inches(width: str) -> float:
    """Return a figure's width in inches.

    Raises:
        UserError: no number of in, cm, mm or pt (inches without a unit), or one outside `WIDTHS`.

    >>> inches("3.3in"), inches("8.4cm"), inches("237.6 pt")
    (3.3, 3.3070866141732282, 3.3)
    """
    units = {"in": 1.0, "": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
    parts = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]*)", width.strip())
    if parts is None or parts[2] not in units:
        raise UserError(f"width is '{width}': expected a number and in, cm, mm or pt, such as 3.3in")
    value = float(parts[1]) * units[parts[2]]
    if not WIDTHS[0] <= value <= WIDTHS[1]:
        raise UserError(f"width is {width}: expected {WIDTHS[0]:g} to {WIDTHS[1]:g} inches")
    return value


def _expand(paths: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Split the arguments into models to inspect and folders of training runs."""
    models: list[str] = []
    studies: list[Path] = []
    for name in paths:
        path = user_path(name)
        kind = kind_of(path) if path.is_dir() else None
        if kind == "study":
            raise UserError(
                f"{path} is a study: draw it in a clone of the repository with python -m lab NAME --figures FOLDER"
            )
        if kind == "inspection":
            models.append(str(path / "inspection.json"))
            continue
        if path.is_dir() and not (path / "config.json").is_file():
            study = load_study(path)
            finished = [next((run for run in study.of(label) if run.finished), None) for label in study.labels]
            runs = [str(run.folder) for run in finished if run is not None]
            if not runs:
                raise UserError(f"{path} holds no finished run: finish one first, attnres compare continues them")
            models += runs
            studies.append(path)
            continue
        if (path / "metrics.jsonl").is_file():
            studies.append(path)
        models.append(name)
    return models, studies


def _inspection(name: str, options: dict[str, object]) -> Inspection:
    if Path(name).suffix == ".json" or user_path(name).is_file():
        return Inspection.load(user_path(name))
    settings: dict = {"model": name, **options}
    return look(InspectConfig(**settings), Console(quiet=True))


def write_drawn(console: Console, name: str, drawn: Drawn, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write figures and their captions, print their names, and return the files."""
    captions = folder / "captions.md"
    texts = [f"**{plot.name}. {plot.title}.** {plot.caption}\n" for plot in drawn.plots]
    write_text(captions, "\n".join(texts))  # first: the folder is recognised by it
    files = [*save_all(drawn.plots, folder, formats), captions]
    say(console, f"{name}: {', '.join(plot.name for plot in drawn.plots) or 'nothing'}")
    for figure, reason in drawn.left_out:
        say(console, f"  without {figure}: {reason}")
    return files


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, numbered if two are equal."""
    return [name if names.count(name) == 1 else f"{name} {names[:i].count(name) + 1}" for i, name in enumerate(names)]


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "model"
