"""Table, CSV and page from run folders: what `attnres report` does, and how `attnres compare` ends."""

from pathlib import Path

from rich.console import Console

from attnres.folders import refuse_other
from attnres.report.columns import print_table
from attnres.report.page import write_report
from attnres.report.runs import Study, load_study
from attnres.report.table import build_table
from attnres.report.verdict import verdict
from attnres.terminal import wide


def show(*folders: Path, out: Path, images: str | None = None) -> Study:
    """Write table.csv, curves.csv and report.html into `out` from the runs in `folders`, and print the table.

    `images`: "png" or "svg", to write every figure as a file of its own too. Raises `UserError`.
    """
    study = load_study(*folders)
    if not any(Path(folder).resolve() == Path(out).resolve() for folder in folders):
        refuse_other(out, "report")
    written = write_report(study, out, images)
    table = build_table(study)
    console = wide(Console())
    print_table(table, verdict(study, table), console)
    console.print(f"\n{written[0]}", style="bold", highlight=False, soft_wrap=True)
    return study
