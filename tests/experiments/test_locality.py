"""What is said of reads is what their weights say, one output after the other; of the plain sum it is one."""

import csv
import runpy
from pathlib import Path

import locality
import numpy as np
import pytest
import torch
from tiny import NARROW

import attnres
from attnres.errors import UserError
from attnres.inspect import Inspection, from_trace


def looked_at(residual: str, pull: float = 0.0) -> Inspection:
    """A model of three layers on some tokens, with queries drawn with a deviation of `pull`."""
    torch.manual_seed(0)
    model = attnres.build({**NARROW, "num_hidden_layers": 3}, residual, vocab_size=50).eval()
    if pull:
        torch.nn.init.normal_(model.residual.query, std=pull)
    with attnres.record(model) as trace, torch.no_grad():
        model(input_ids=torch.arange(24).view(2, 12))
    return from_trace(model, trace, name=residual)


def test_a_plain_sum_is_one_and_full_is_what_its_weights_say(tmp_path: Path) -> None:
    plain, full = looked_at("standard"), looked_at("full", pull=3.0)
    assert locality.measure(plain)[:2] == pytest.approx((1, 1), abs=1e-5) and locality.measure(plain)[4] == 3
    assert full.routing is not None
    distances, embeddings = [], []
    for weights in full.routing["weights"][4:]:  # of the embedding and of each output, oldest first
        newest = len(weights) - 1
        distances.append(sum(weight * (newest - place) for place, weight in enumerate(weights)) / (newest / 2))
        embeddings.append(weights[0] * (newest + 1))
    assert abs(np.mean(distances) - 1) > 0.01
    assert locality.measure(full)[:2] == pytest.approx((np.mean(distances), np.mean(embeddings)), rel=1e-3)
    for inspection in (plain, full):
        inspection.save(tmp_path / f"{inspection.model['name']}.json")
    locality.main((tmp_path / "standard.json", tmp_path / "full.json"), out=tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["residual"] for row in rows] == ["standard", "full"] and rows[0]["distance"] == "1.000"


def test_a_residual_without_a_mixing_matrix_is_refused() -> None:
    with pytest.raises(UserError, match="not linear in its outputs"):
        locality.measure(looked_at("postnorm"))


def test_a_mistake_is_one_sentence_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["locality.py", "missing.json", "--out", "never.csv"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(locality.__file__, run_name="__main__")
    said = capsys.readouterr().err
    assert left.value.code == 2 and "error: cannot read missing.json" in said and said.count("\n") == 1
    assert not Path("never.csv").exists()
