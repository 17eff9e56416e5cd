"""The benchmark of all mechanisms, on a tiny model and two steps."""

import dataclasses
import json
from subprocess import CompletedProcess
from types import SimpleNamespace

import mechanisms
import pytest
from tiny import NARROW

from attnres.models import build
from attnres.residuals import RESIDUALS, make_residual
from attnres.residuals.registry import ships
from attnres.training.config import DataConfig, ModelConfig, TrainConfig
from fuzz.forked import forked


def in_a_fork(command, **_):
    """Run `python -m attnres ...` in a child of this process, which has imported what it needs."""
    assert command[1:3] == ["-m", "attnres"]
    outcome = forked(command[3:])
    return CompletedProcess(command, outcome.code, "", outcome.said)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    root = tmp_path_factory.mktemp("mechanisms")
    (root / "text").mkdir()
    for i in range(40):
        (root / "text" / f"{i}.txt").write_text(f"a source of depth {i} reads what an earlier layer writes. " * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNRES_CACHE", str(root / "cache"))
        base = TrainConfig(
            model=ModelConfig(size=NARROW),
            data=DataConfig(source=str(root / "text"), tokenizer="bpe:280", seq_len=16, held_out=0.2, val_windows=4),
            steps=2,
            batch_size=2,
            dtype="fp32",
            device="cpu",
            val_every=2,
            depth_every=1,
        )
        patch.setattr(mechanisms, "subprocess", SimpleNamespace(run=in_a_fork))
        yield mechanisms.Bench(base, root / "runs", seconds=0.0)


@pytest.fixture(scope="module")
def results(bench):
    rows = {
        "standard": ("standard", {}),
        "full heads=2": ("full", {"heads": 2}),
        "broken": ("block", {"num_blocks": 9}),
    }
    said = []
    return bench.run(rows, said.append), said


def test_a_row_is_a_registered_mechanism_or_a_variant_that_nano_can_have():
    rows = mechanisms.rows_of()
    assert list(rows)[: len(rows) - len(mechanisms.VARIANTS)] == [name for name in RESIDUALS if ships(name)]
    for residual, settings in rows.values():
        make_residual(residual, 24, 128, **settings)


@pytest.mark.long
def test_each_is_trained_looked_at_drawn_and_timed(bench, results):
    rows, said = results
    assert said == ["timing standard, full heads=2 in turn"]
    for label in ("standard", "full heads=2"):
        row = rows[label]
        assert row["tools"] == {"record": None, "report": None, "figures": None}
        summary = json.loads((bench.runs / mechanisms.slug(label) / "summary.json").read_text())
        assert (row["val_loss"], row["peak_bytes"]) == (summary["val_loss"], summary["peak_memory_bytes"])
        assert row["peak_ratio"] == row["peak_bytes"] / rows["standard"]["peak_bytes"] and row["rounds"] == 3
        assert row["ratio"] > 0 and row["plain_ratio"] > 0
    model = build(NARROW, "full", vocab_size=280, settings={"heads": 2})
    assert rows["full heads=2"]["extra_parameters"] == sum(p.numel() for p in model.residual.parameters())
    assert rows["standard"]["ratio"] == 1.0 and rows["standard"]["extra_parameters"] == 0


@pytest.mark.long
def test_one_that_fails_is_a_row_with_its_reason(results):
    rows, _ = results
    assert "error: num_blocks is 9: expected 1 to 4" in rows["broken"]["reason"] and "ratio" not in rows["broken"]
    lines = mechanisms.markdown(rows).splitlines()
    assert len(lines) == 5 and all(line.count("|") == 8 for line in lines)
    assert lines[2].startswith("| standard | 0 | ") and lines[2].endswith("| ok |")
    assert "num_blocks is 9" in lines[4]


@pytest.mark.long
def test_what_is_not_finite_or_cannot_be_drawn_is_told(bench, results, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for file in ("summary.json", "config.json", "inspection.json", "metrics.jsonl"):
        (folder / file).write_bytes((bench.runs / "standard" / file).read_bytes())
    assert mechanisms.tools(folder)["record"] is None
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in metrics if '"depth"' not in line))
    (folder / "inspection.json").write_text("{}")
    told = mechanisms.tools(folder)
    assert "no inspection" in told["record"] and "no inspection" in told["figures"]


@pytest.mark.long
def test_the_command_writes_json_and_a_chart(bench, results, tmp_path, monkeypatch, capsys):
    rows, _ = results
    small = []

    def run(self, asked, say=print):
        small.append((self.base, list(asked)))
        return rows

    monkeypatch.setattr(mechanisms.Bench, "run", run)
    line = ["mechanisms.py", "--only", "block", "full heads=4", "--steps", "7", "--out", str(tmp_path / "m.json")]
    monkeypatch.setattr("sys.argv", [*line, "--device", "cpu"])
    mechanisms.main()
    base, asked = small[0]
    assert asked == ["standard", "block", "full heads=4"]
    assert (base.steps, base.val_every, base.optim.optimizer, base.dtype) == (7, 7, "muon", "fp32")
    written = json.loads((tmp_path / "m.json").read_text())
    assert written["rows"] == json.loads(json.dumps(rows)) and written["training"]["steps"] == 7
    assert (tmp_path / "m.svg").is_file()
    assert mechanisms.markdown(rows) in capsys.readouterr().out
    before = {"command": "once", "environment": {"commit": "abc", "date": "then"}, "rows": {"dca": {"ratio": 1.5}}}
    (tmp_path / "m.json").write_text(json.dumps(before))
    monkeypatch.setattr("sys.argv", [*line, "--device", "cpu", "--add"])
    mechanisms.main()
    written = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert written["dca"] == {"ratio": 1.5, "measured": {"commit": "abc", "date": "then", "command": "once"}}
    assert list(written) == ["dca", *rows] and "measured" not in written["standard"]
    monkeypatch.setattr("sys.argv", [*line, "--only", "blok"])
    with pytest.raises(SystemExit):
        mechanisms.main()
    assert "there is no row 'blok'" in capsys.readouterr().err


@pytest.mark.long
def test_a_finished_row_is_not_trained_again_and_one_of_another_configuration_is_refused(bench, results, monkeypatch):
    rows, _ = results
    with monkeypatch.context() as patch:
        patch.setattr(mechanisms.subprocess, "run", None)
        row = bench.train("standard", "standard", {})
    assert row == {key: rows["standard"][key] for key in row} and row["tools"]["report"] is None
    other = dataclasses.replace(bench, base=dataclasses.replace(bench.base, steps=3))
    assert "steps" in other.train("standard", "standard", {})["reason"]
