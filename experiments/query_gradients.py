"""Which reads still learn? The gradient of each query, and what its read costs when it is set back, by checkpoint.

    attnres train --config RUN.yaml --keep-at 2000 --out runs/whole
    python experiments/query_gradients.py runs/whole --source FOLDER --steps 2000 5000 --out whole.csv

On held-out windows of the run, in fp32: the norm of the loss's gradient with respect to the read's query, the largest
logit that the read can give (|query x gain| sqrt(d)), and the loss's change where query and gain of this read alone are
what they started from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.files import write_text
from attnres.text import csv_text
from attnres.training.checkpoint import load_model, stored_state
from attnres.training.config import from_dict
from attnres.training.data import held_out, prepare_from
from lab.branch import kept_checkpoint

FIELDS = ("run", "step", "read", "query_gradient", "largest_logit", "set_back", "windows")


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Nats per token of windows (count, length + 1)."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def mean_loss(model: Any, windows: Tensor, rows: int) -> float:
    """The same of all windows, `rows` at a time, without gradients."""
    with torch.no_grad():
        return sum(loss_of(model, part).item() * len(part) for part in windows.split(rows)) / len(windows)


def measure(model: Any, windows: Tensor, rows: int) -> Iterator[tuple[float, float, float]]:
    """Of each read: its query's gradient, the largest logit, what setting it back adds to the loss."""
    query, gain = model.residual.query, model.residual.gain
    model.zero_grad()
    for part in windows.split(rows):
        (loss_of(model, part) * (len(part) / len(windows))).backward()
    gradients, logits = query.grad.norm(dim=1), (query * gain).norm(dim=1) * query.shape[1] ** 0.5
    whole = mean_loss(model, windows, rows)
    for read in range(len(query)):
        kept = query.data[read].clone(), gain.data[read].clone()
        query.data[read], gain.data[read] = 0.0, 1.0
        changed = mean_loss(model, windows, rows) - whole
        query.data[read], gain.data[read] = kept
        yield gradients[read].item(), logits[read].item(), changed


def main(
    run: tyro.conf.Positional[Path],
    *,
    out: Path,
    steps: tuple[int, ...],
    source: str | None = None,
    windows: int = 32,
    rows: int = 8,
) -> None:
    """Measure the reads of some checkpoints of a run.

    Args:
        run: folder of a run.
        out: CSV, a row for each read and step.
        steps: kept ones, or the last.
        source: its text, where that no longer lies where config.json says.
        windows: held-out windows, the first of the run's own. rows: of a batch.
    """
    table = []
    for step in steps:
        last = run / "checkpoint"
        folder = last if stored_state(last)["step"] == step else kept_checkpoint(run, step)
        state = stored_state(folder)
        config = from_dict(state["config"])
        if source is not None:
            config.data.source = source
        model = load_model(folder, state).float().train()
        if not hasattr(model.residual, "query"):
            raise UserError(f"{run}: the residual '{model.config.residual}' has no queries")
        chosen = held_out(prepare_from(config.data, progress=False), config.data)[:windows]
        for read, values in zip(model.residual.layout(), measure(model, chosen, rows), strict=True):
            gradient, logit, changed = values
            row = (run.name, step, read.name, f"{gradient:.3e}", f"{logit:.2f}", f"{changed:+.4f}", len(chosen))
            print(*row, flush=True)
            table.append(row)
    write_text(out, csv_text(FIELDS, table))


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
