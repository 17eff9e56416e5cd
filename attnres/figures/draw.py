"""The figures of models, runs or saved inspections: what the command `attnres figures` does."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnres.errors import UserError
from attnres.figures import Comparison, Plot, draw_comparison, draw_model, save_all
from attnres.figures.write import Drawn, check_formats
from attnres.files import user_path, write_text
from attnres.folders import kind_of, refuse_other
from attnres.inspect.config import InspectConfig
from attnres.inspect.inspection import By, Inspection
from attnres.inspect.look import look
from attnres.progress import say
from attnres.report.runs import load_study
from attnres.report.sections import comparison_of


def draw(
    sources: Sequence[str],
    out: Path | str,
    formats: Sequence[str],
    options: dict[str, object],
    by: By = "contribution",
) -> list[Path]:
    """Write every figure that applies, and `captions.md`; print what was written and what does not apply, and why.

    Args:
        sources: model folders, run folders, folders of runs, hub names, or what `attnres inspect` wrote. Of a folder of
            runs the first seed of each label is inspected; its dynamics are means over seeds.
        out: folder; with several models each has a folder of its own in it, and what compares them lies above.
        formats: of pdf, png and svg.
        options: fields of `InspectConfig`, for those that are models.
        by: the numbers of sources that are shown.

    Raises:
        UserError: something given is none of these, `out` is a file or holds a model, or a file cannot be written.
    """
    check_formats(formats)
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
    if studies:  # what these say of training is of all seeds
        compared = compared.without("dynamics")
    side_by_side = draw_comparison(compared, by)
    training = draw_comparison(runs.without("inspections"))
    written = list[Path]()
    if len(inspections) == 1:
        drawn = draw_model(inspections[0], by)
        written += write_drawn(console, names[0], drawn + side_by_side + training, out, formats)
    else:
        write_text(out / "captions.md", "")  # first: the folder is known by it
        for inspection, name, folder in zip(
            inspections, names, _distinct([_file_name(name) for name in names]), strict=True
        ):
            written += write_drawn(console, name, draw_model(inspection, by), out / folder, formats)
        written += write_drawn(console, "side by side", side_by_side + training, out, formats)
    say(console, f"{len(written)} files in {out}")
    return written


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
    """Write figures and their captions, and print which; return the files."""
    captions = folder / "captions.md"
    write_text(captions, "\n".join(_caption(plot) for plot in drawn.plots))  # first: the folder is known by it
    files = [*save_all(drawn.plots, folder, formats), captions]
    say(console, f"{name}: {', '.join(plot.name for plot in drawn.plots) or 'nothing'}")
    for figure, reason in drawn.left_out:
        say(console, f"  without {figure}: {reason}")
    return files


def _caption(plot: Plot) -> str:
    return f"**{plot.name}. {plot.title}.** {plot.caption}\n"


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, numbered where two are the same."""
    return [name if names.count(name) == 1 else f"{name} {names[:i].count(name) + 1}" for i, name in enumerate(names)]


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "model"
