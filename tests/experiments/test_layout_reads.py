"""What is said of a run's reads, of an inspection made by hand."""

import csv
import json

import layout_reads
import pytest

MADE = {
    "output_rms": [1.0, 1.0, 2.0, 4.0],
    "dynamics": {"grad_rms": [[9.0] * 4, [8.0, 1.0, 1.0, 2.0]]},
    "mixing_contribution": [[1.0], [0.25, 0.25, 0.5, 0.0, 0.0]],
    "query_cosine": [[1.0, None, 0.5], [None, None, None], [0.5, None, 1.0]],
}


def test_a_run_s_row_is_what_its_inspection_says(tmp_path, monkeypatch, capsys):
    for name, made in (("ours", MADE), ("standard", MADE | {"query_cosine": None})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inspection.json").write_text(json.dumps(made))
        (tmp_path / name / "config.json").write_text(json.dumps({"optim": {"optimizer": "muon"}}))
    out = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["layout_reads.py", *map(str, sorted(tmp_path.glob("*s*"))), "--out", str(out)])
    assert layout_reads.main() == 0
    ours, standard = csv.DictReader(out.read_text().splitlines())
    expected = {"outputs": 4.0, "gradients": 0.25, "largest": 4 / 1.5, "embedding": 0.25, "first MLP": 0.5}
    expected |= dict.fromkeys(("cosine", "lowest", "highest"), 0.5)
    assert {name: float(ours[name]) for name in expected} == pytest.approx(expected, abs=1e-3)
    assert (ours["run"], ours["optimizer"], standard["cosine"]) == ("ours", "muon", "")
    monkeypatch.setattr("sys.argv", ["layout_reads.py", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        layout_reads.main()
    assert ended.value.code == 2 and "expected a finished run folder" in capsys.readouterr().err
