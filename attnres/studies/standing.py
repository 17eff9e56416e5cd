"""How a comparison stands while its runs go on: the last held-out loss of each variant, beside the baseline's."""

from pathlib import Path

from rich.table import Table

from attnres.run_names import label_and_seed, run_name
from attnres.studies.plan import Plan
from attnres.terminal import grid
from attnres.text import number
from attnres.training.metrics import growing


class Standing:
    """Held-out losses of a comparison's runs, read from their folders as they grow.

    Args:
        folder: of the comparison. plan: its variants and runs.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.baseline, self.names = folder, plan.baseline, list(plan.runs)
        self._losses: dict[str, tuple[int, dict[int, float]]] = {}

    def losses(self, name: str) -> dict[int, float]:
        """Return the held-out loss of a run by step, as far as it came."""
        path = self.folder / name / "metrics.jsonl"
        try:
            size = path.stat().st_size
            if self._losses.get(name, (-1, {}))[0] != size:
                self._losses[name] = size, dict(growing(path, "val"))
        except OSError:
            return {}
        return self._losses[name][1]

    def finished(self) -> list[str]:
        """Return the names of the runs that have ended."""
        return [name for name in self.names if (self.folder / name / "summary.json").is_file()]

    def comparable(self) -> bool:
        """Return whether a run of the baseline and one of another variant have ended."""
        labels = {label for label, _ in filter(None, map(label_and_seed, self.finished()))}
        return self.baseline in labels and len(labels) > 1

    def table(self) -> Table | None:
        """Return a row for each run that was measured: step, loss, the difference to the baseline of its seed at the
        last step that both have. None before the first measurement."""
        table = grid("run", right=("step", "held-out loss", f"minus {self.baseline}", "at step"))
        for name in self.names:
            losses = self.losses(name)
            if not losses:
                continue
            label, seed = label_and_seed(name) or ("", 0)
            base = {} if label == self.baseline else self.losses(run_name(self.baseline, seed))
            step = max(losses.keys() & base.keys(), default=None)
            gap = ("", "") if step is None else (number(losses[step] - base[step], 3, signed=True), f"{step:,}")
            table.add_row(name, f"{max(losses):,}", number(losses[max(losses)], 3), *gap)
        return table if table.row_count else None
