"""What a short run's page says of longer ones: the measured files' numbers, and only of their own model."""

import csv
import json
from pathlib import Path

import pytest
from synthetic import write_run

from attnres.report import lasting, load_study
from attnres.report.page import write_report

DATA = Path(__file__).parents[2] / "docs" / "data"


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def page_of(folder):
    write_report(load_study(folder), folder)
    return (folder / "report.html").read_text()


def test_the_package_has_the_measured_curves():
    later = rows_of(DATA / "lasting_runs" / "curves.csv")
    one_seed = [row for row in later if row["label"] in ("full", lasting.WHOLE_RATE)]
    three_seeds = rows_of(DATA / "lasting_seeds" / "curves.csv")
    packaged = rows_of(Path(lasting.__file__).parent / "lasting.csv")
    assert sorted(map(str, packaged)) == sorted(map(str, three_seeds + one_seed))


def test_a_short_page_says_what_lasts(tmp_path):
    for residual in ("standard", "block"):
        write_run(tmp_path, residual)
    text = page_of(tmp_path)
    assert "And with more training?" in text
    assert "end at 2.0 M tokens" in text
    (block,) = [row for row in rows_of(DATA / "lasting_seeds" / "table.csv") if row["label"] == "block"]
    assert f"{float(block['difference']):.3f}".replace("-", "−") in lasting.lead(2e6)


@pytest.mark.parametrize("change", ["size", "baseline", "length", "finetune", "no depth reads"])
def test_other_pages_say_nothing_of_it(tmp_path, change):
    second = "rescaled" if change == "no depth reads" else "block"
    for residual in ("full" if change == "baseline" else "standard", second):
        folder = write_run(tmp_path, residual, steps=3000 if change == "length" else 1000)
        config = json.loads((folder / "config.json").read_text())
        if change == "size":
            config["model"]["size"] = "100m"
        if change == "finetune":
            config["finetune"] = {"init_from": "elsewhere"}
        (folder / "config.json").write_text(json.dumps(config))
    assert "And with more training?" not in page_of(tmp_path)
