"""What a run measured, without what the clock says."""

from pathlib import Path
from typing import Any

from attnres.training.records import read_metrics

CLOCK = ("tokens_per_s", "step_s", "flops_per_s")


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, which another run of the same arithmetic has too."""
    return [{name: line[name] for name in line if name not in CLOCK} for line in read_metrics(run / "metrics.jsonl")]
