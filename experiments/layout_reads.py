"""What depth reads do in finished runs, a row a run: magnitudes, what the output reads, and how alike queries are.

    python experiments/layout_reads.py RUNS... --out docs/data/layout_reads.csv

RUNS are run folders of `attnres train` or `attnres compare`; each has an inspection.json. Columns:

    outputs, gradients         geometric mean over the last quarter of the sublayers over that of the first: of the
                               rms of what they write, and of the rms of the loss's gradient at it
    largest                    the largest rms of an output, over the median one
    embedding, first MLP       what they contribute to the output's read (projections on it: all sum to one)
    cosine, lowest, highest    the mean cosine between two reads' queries (times key gains), and the extremes
"""

import argparse
import csv
import json
import sys
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any

from attnres.errors import UserError


def growth(values: list[float]) -> float:
    """Return the geometric mean of the last quarter over that of the first."""
    quarter = len(values) // 4
    return geometric_mean(values[-quarter:]) / geometric_mean(values[:quarter])


def row(run: Path) -> dict[str, Any]:
    """Return a run's row."""
    file = run / "inspection.json"
    if not file.is_file():
        raise UserError(f"{run} has no inspection.json: expected a finished run folder of attnres train or compare")
    made = json.loads(file.read_text("utf-8"))
    outputs = made["output_rms"]
    optimizer = json.loads((run / "config.json").read_text("utf-8"))["optim"]["optimizer"]
    contributions = made["mixing_contribution"][-1] if made["mixing_contribution"] else None
    cosines = made["query_cosine"] or []
    pairs = [cosines[i][j] for i, j in combinations(range(len(cosines)), 2) if cosines[i][j] is not None]
    values = {
        "outputs": growth(outputs),
        "gradients": growth(made["dynamics"]["grad_rms"][-1]),
        "largest": max(outputs) / median(outputs),
        "embedding": contributions and contributions[0],
        "first MLP": contributions and contributions[2],
        "cosine": mean(pairs) if pairs else None,
        "lowest": min(pairs, default=None),
        "highest": max(pairs, default=None),
    }
    return {"run": run.name, "optimizer": optimizer} | {
        name: "" if value is None else round(value, 3) for name, value in values.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        rows = [row(run) for run in options.runs]
    except UserError as error:
        parser.error(str(error))
    with options.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for each in rows:
        print(" | ".join(map(str, each.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
