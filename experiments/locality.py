"""Are reads local, and do they keep the embedding? Distances and the embedding's share beside the plain sum's.

    attnres inspect runs/full-seed0 --out looks/full-seed0
    python experiments/locality.py looks/*/inspection.json --out locality.csv

A plain residual's read reaches half of what lies below it, and the embedding is one of its n + 1 outputs: both
are 1 for it by coefficients. By contributions (what an output is of the read, by projection on it) they are not, as its
outputs differ in size: compare with the inspection of a standard model."""

from pathlib import Path

import numpy as np
import tyro

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.files import write_text
from attnres.inspect import Inspection
from attnres.inspect.inspection import depth_distance, embedding_persistence
from attnres.residuals import depths, layout_of
from attnres.text import csv_text

FIELDS = ("name", "residual", "distance", "embedding", "distance_contribution", "embedding_contribution", "reads")
FIRST = 4
"""Sublayers that have written before the first read which counts: before that there is little to choose from."""


def measure(inspection: Inspection) -> tuple[float, float, float, float, int]:
    """Over reads, means of distance over n / 2 and of the embedding's share times n + 1: by coefficients, then by
    contributions. And of how many reads."""
    if inspection.mixing is None or inspection.mixing_contribution is None or inspection.routing is None:
        raise UserError(
            f"{inspection.model['name']}: its residual is not linear in its outputs, or the file is an old one"
        )
    places = depths(layout_of(inspection.routing))
    written = np.asarray(places)
    late = written >= FIRST
    if not late.any():
        raise UserError(f"{inspection.model['name']}: no read has {FIRST} sublayers below it")
    means = []
    for table in (inspection.mixing, inspection.mixing_contribution):
        matrix = np.asarray(table)
        means.append(float((depth_distance(matrix, places)[late] / (written[late] / 2)).mean()))
        means.append(float((embedding_persistence(matrix)[late] * (written[late] + 1)).mean()))
    return means[0], means[1], means[2], means[3], int(late.sum())


def main(inspections: tyro.conf.Positional[tuple[Path, ...]], *, out: Path) -> None:
    """Measure models that `attnres inspect --out` has written of.

    Args:
        inspections: files inspection.json.
        out: CSV, a row for each.
    """
    rows = []
    for path in inspections:
        inspection = Inspection.load(path)
        *means, reads = measure(inspection)
        rows.append((inspection.model["name"], inspection.model["residual"], *(f"{one:.3f}" for one in means), reads))
        print(*rows[-1], flush=True)
    write_text(out, csv_text(FIELDS, rows))


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
