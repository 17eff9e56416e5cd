"""What is said of a read is what a finite difference and a model loaded with that read set back say."""

import csv
from pathlib import Path

import pytest
import query_gradients
import torch

from attnres.errors import UserError
from attnres.models import load
from attnres.reading import read_json
from attnres.training.checkpoint import kept
from attnres.training.config import from_dict
from attnres.training.data import held_out, prepare_from


def test_gradients_and_costs_of_each_read(run: Path, tmp_path: Path) -> None:
    query_gradients.main(run, out=tmp_path / "reads.csv", steps=(4, 8), windows=4, rows=3)
    with (tmp_path / "reads.csv").open() as file:
        rows = list(csv.DictReader(file))
    data = from_dict(read_json(run / "config.json")).data
    windows = held_out(prepare_from(data, progress=False), data)[:4]
    model = load(kept(run, 4) / "model").double().train()
    assert len(rows) == 2 * len(model.residual.query)
    assert [row["read"] for row in rows[:2]] == ["attention 0", "mlp 0"] and rows[-1]["read"] == "output"

    def loss() -> float:
        return query_gradients.loss_of(model, windows).item()

    whole, read = loss(), 3
    start = model.residual.query.data[read].clone()
    total = 0.0
    for at in range(len(start)):  # the gradient, one number after the other
        sides = []
        for step in (1e-3, -1e-3):
            model.residual.query.data[read, at] = start[at] + step
            sides.append(loss())
            model.residual.query.data[read, at] = start[at]
        total += ((sides[0] - sides[1]) / 2e-3) ** 2
    assert float(rows[read]["query_gradient"]) == pytest.approx(total**0.5, rel=2e-3)
    gain = model.residual.gain.data[read]
    along = torch.nn.functional.normalize(start * gain, dim=0) * len(start) ** 0.5  # of RMS 1, as keys are
    logit = (start * gain) @ along
    assert float(rows[read]["largest_logit"]) == pytest.approx(logit.item(), abs=0.006)
    model.residual.query.data[read], model.residual.gain.data[read] = 0.0, 1.0
    assert float(rows[read]["set_back"]) == pytest.approx(loss() - whole, abs=1e-4)


def test_a_run_without_queries_or_that_step_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kept no checkpoint of step 5"):
        query_gradients.main(run, out=tmp_path / "reads.csv", steps=(5,))
    assert not (tmp_path / "reads.csv").exists()
