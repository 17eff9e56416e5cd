"""A way around the reads is used as much as the weights and gates of the model itself say."""

import csv
from pathlib import Path

import pytest
import torch
import ways_around
from tiny import NARROW

import attnres
from attnres.errors import UserError
from attnres.inspect import Inspection, from_trace


def looked_at(residual: str, change=None, **settings) -> tuple[Inspection, torch.nn.Module]:
    torch.manual_seed(0)
    size = {**NARROW, "num_hidden_layers": 3}
    model = attnres.build(size, residual, vocab_size=50, settings=settings).eval()
    with torch.no_grad():
        if change is not None:
            change(model.residual)
        with attnres.record(model) as trace:
            model(input_ids=torch.arange(24).view(2, 12))
    return from_trace(model, trace, name=residual), trace


def test_a_null_source_has_an_even_share_at_the_start_and_what_queries_give_it_then(tmp_path: Path) -> None:
    for way, _, now, start in ways_around.ways(looked_at("full", null_source=True)[0]):
        assert way == "null" and now == pytest.approx(start, abs=1e-5)
    inspection, trace = looked_at("full", lambda one: torch.nn.init.normal_(one.query, std=3.0), null_source=True)
    each = ways_around.ways(inspection)
    assert len(each) == 6, "all reads but the first, which has the embedding alone"
    last = trace.weights[-1][-1]  # a source like any other, the last one
    assert each[-1][2] == pytest.approx(last, abs=1e-5) and abs(each[-1][2] - each[-1][3]) > 0.01
    inspection.save(tmp_path / "one.json")
    ways_around.main((tmp_path / "one.json",), out=tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["read"] for row in rows] == [one[1] for one in each]
    assert float(rows[-1]["share"]) == pytest.approx(each[-1][2], abs=1e-4)


def test_a_gate_is_held_beside_where_it_starts() -> None:
    each = ways_around.ways(looked_at("block", lambda one: one.gates.gate.fill_(1.0), gate="scalar", gate_init=-1.0)[0])
    assert len(each) == 6 and {one[0] for one in each} == {"gate"}
    assert all(one[2] == pytest.approx(0.7311, abs=1e-4) and one[3] == pytest.approx(0.2689, abs=1e-4) for one in each)


@pytest.mark.parametrize("residual", ["standard", "block"])
def test_a_model_without_a_way_around_is_refused(residual: str) -> None:
    with pytest.raises(UserError, match=r"no way around its reads|reads nothing"):
        ways_around.ways(looked_at(residual)[0])
