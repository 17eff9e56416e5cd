"""The findings of the nanoGPT study, re-examined: spikes of the embedding's weight at statement and sentence starts.

    attnres compare --config recipes/findings_code.yaml
    attnres compare --config recipes/findings_prose.yaml --source TEXT
    python experiments/findings.py runs/findings/code runs/findings/prose --out runs/findings

For each comparison NAME it writes OUT/NAME/findings.json, weights.csv and knock_outs.csv, and findings.txt, which it
prints too; OUT/starts.png and .pdf show all of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from spike_figure import starts
from spike_files import save, table
from spikes import FindingsConfig, findings

from attnres.cli import carry_out
from attnres.figures.write import Drawn, save_all


@dataclass
class Options:
    """What to look at."""

    studies: tyro.conf.Positional[list[str]]
    """Folders of comparisons, each on data of its own."""
    out: Annotated[Path, tyro.conf.arg(name="out")]
    """Where a folder is made for each."""
    documents: int = 128
    """Held-out documents of each, at most."""
    windows: int = 16
    """Windows of each document, at most; as long as in training."""
    language: str = "auto"
    """code, prose, or auto."""
    device: str = "auto"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    all_found = []
    for study in options.studies:
        results = findings(
            FindingsConfig([study], options.documents, options.windows, options.language, options.device)
        )
        save(results, options.out / Path(study).resolve().name)
        print(table(results), flush=True)
        all_found.append(results)
    drawn = Drawn()
    drawn.add("starts", lambda: starts(all_found))
    save_all(drawn.plots, options.out)


if __name__ == "__main__":
    carry_out(main)
