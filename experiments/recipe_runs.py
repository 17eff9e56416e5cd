"""Final losses of a recipe's runs as docs/data has them, for the one rule of comparisons (`attnres.stats.Recipe`)."""

import csv
import math
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"

Run = tuple[str, int, float]


def rows(name: str) -> list[dict[str, str]]:
    """The lines of a CSV file of docs/data."""
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def micro() -> list[Run]:
    """The 0.9 M recipe's runs, (mechanism, seed, loss): three studies and reruns on other processors.

    A run that several studies share counts once; one that diverged (muddformer's) has no loss and is left out.
    """
    found = set[Run]()
    for study in ("rivals", "ablations", "noise"):
        for row in rows(f"studies/micro/{study}/runs.csv"):
            if row["arm"] in ("recipe", "control") and row["quantity"] == "loss" and row["step"] == "2000":
                found.add((row["label"], int(row["seed"]), round(float(row["value"]), 5)))
    for row in rows("processors_micro.csv"):
        if row["step"] == "2000":
            found.add((row["variant"], int(row["seed"]), round(float(row["loss"]), 5)))
    return sorted(run for run in found if math.isfinite(run[2]))


def finals(name: str) -> list[Run]:
    """The last loss of each run of a comparison's curves.csv, runs at another learning rate left out."""
    last = {(row["label"], int(row["seed"])): float(row["loss"]) for row in rows(f"{name}/curves.csv")}
    return [(label, seed, loss) for (label, seed), loss in last.items() if "-lr" not in label]
