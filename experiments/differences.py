"""Held-out loss of a comparison's variants less that of its baseline over training, from the small files in docs/data.

    python experiments/differences.py docs/data/finetune_layouts --since 100 --out docs/images/finetune_loss.png

Reads compare.json and curves.csv (columns run, step, val_loss), which stay when run folders are gone."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import tyro

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.figures.plot import DIFFERENCE, STEP
from attnres.figures.style import style
from attnres.reading import read_json
from attnres.text import label_and_seed
from lab.charts import Curves, Line


def differences(folder: Path, since: int) -> list[Line]:
    """A line for each variant but the baseline: means over the seeds that both have, from a step on."""
    recorded = read_json(folder / "compare.json")
    baseline, losses = recorded["baseline"], defaultdict[str, dict[tuple[int, int], float]](dict)
    with (folder / "curves.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            named, step = label_and_seed(row["run"]), int(row["step"])
            if named is not None and step >= since:
                losses[named[0]][step, named[1]] = float(row["val_loss"])
    lines = []
    for label in recorded["labels"]:
        common = sorted(losses[label].keys() & losses[baseline].keys())
        by_step = defaultdict[int, list[float]](list)
        for place in common:
            by_step[place[0]].append(losses[label][place] - losses[baseline][place])
        if label != baseline and by_step:
            lines.append(Line.through(label, [(step, fmean(each)) for step, each in by_step.items()]))
    if not lines:
        raise UserError(f"{folder} has no losses from step {since} on beside those of {baseline}")
    return lines


def main(folder: tyro.conf.Positional[Path], *, out: Path, since: int = 0) -> None:
    """Draw the figure.

    Args:
        folder: one with compare.json and curves.csv.
        out: PNG, PDF or SVG.
        since: leave out what comes before this step.
    """
    chart = Curves("differences", "", "", STEP, DIFFERENCE, {"": differences(folder, since)}, zero=True)
    with style():
        chart.draw().figure.savefig(out, dpi=300)


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
