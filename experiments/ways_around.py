"""Is a way around the reads used? The null source's weight beside an even share, a gate beside where it starts.

    python -m lab ablations --preset micro --runs 'recipe/block-null*' 'recipe/block-gate*'
    python experiments/ways_around.py runs/studies/micro/ablations/recipe/block-[gn]*/inspection.json --out ways.csv

A read whose weights are even gives a null source one part in as many as it has sources: more is less of a read. A gate
is the read's share beside the plain sum: less than it starts from is less of a read. The first read has one
source and no choice."""

from pathlib import Path
from statistics import fmean

import numpy as np
import tyro

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.files import write_text
from attnres.inspect import Inspection
from attnres.inspect.inspection import Routing
from attnres.residuals import make_residual
from attnres.residuals.mechanisms.depth_attention import NULL
from attnres.text import csv_text

FIELDS = ("name", "way", "read", "share", "start")
GATE = "gate"


def ways(inspection: Inspection) -> list[tuple[str, str, float, float]]:
    """Of each read with a choice: which way around it has, the read's name, its share now and at the start."""
    name, settings = inspection.model["name"], inspection.model["settings"]
    routing = Routing.of(inspection, "weight")
    if routing is None:
        raise UserError(f"{name}: its residual reads nothing")
    reads = [read.name for read in routing.layout]
    if settings.get("null_source"):
        each = []
        for read, weights in zip(routing.layout, routing.values, strict=True):
            share = {source.name: weight for source, weight in zip(read.sources, weights, strict=True)}
            if NULL.name in share:
                each.append((NULL.name, read.name, share[NULL.name], 1 / len(share)))
        return each
    if settings.get("gate") == "scalar" and inspection.learned is not None:
        fresh = make_residual(inspection.model["residual"], len(reads) - 1, inspection.model["width"], **settings)
        gates = zip(reads, np.asarray(inspection.learned[GATE]["values"]), fresh.tables()[GATE].values, strict=True)
        return [(GATE, read, float(now), float(start)) for read, now, start in gates][1:]
    raise UserError(f"{name}: expected null_source=true or gate=scalar, another residual has no way around its reads")


def main(inspections: tyro.conf.Positional[tuple[Path, ...]], *, out: Path) -> None:
    """Measure models that have a way around their reads, and print means over reads.

    Args:
        inspections: files inspection.json, of a run or of `attnres inspect --out`.
        out: CSV, a row for each read.
    """
    rows = []
    for path in inspections:
        inspection = Inspection.load(path)
        each = ways(inspection)
        rows += [(inspection.model["name"], way, read, f"{now:.4f}", f"{start:.4f}") for way, read, now, start in each]
        now, start = fmean(one[2] for one in each), fmean(one[3] for one in each)
        print(
            f"{inspection.model['name']}: {each[0][0]} {now:.3f}, at the start {start:.3f}, {len(each)} reads",
            flush=True,
        )
    write_text(out, csv_text(FIELDS, rows))


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
