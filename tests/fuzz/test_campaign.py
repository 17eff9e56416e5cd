"""A slice of the fault campaign (`make fuzz`), and that the campaign would notice what it is there to notice."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import attnres
from fuzz.audit import judged
from fuzz.disk import FullDisk, try_full_disks
from fuzz.flags import try_flags
from fuzz.folders import try_folders
from fuzz.forked import CALLS_OF, Outcome, Worker, forked
from fuzz.inputs import try_inputs
from fuzz.kills import try_kills
from fuzz.material import Material, make
from fuzz.mutations import mutate
from fuzz.tally import Tally


@pytest.fixture(scope="module")
def material(tmp_path_factory, empty_cache):
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("fuzz") / "work"
        patch.setenv("ATTNRES_CACHE", empty_cache(root.parent / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield make(root, whole=False)


@pytest.mark.parametrize(
    ("code", "said", "verdict"),
    [
        (0, "", "done"),
        (2, "attnres: error: no", "refused"),
        (2, "usage", "traceback"),
        (1, "attnres: error: unforeseen", "unforeseen"),
        (0, "Traceback (most recent call last):", "traceback"),
        (99, "", "traceback"),
        (-11, "", "traceback"),
        (None, "", "slow"),
    ],
)
def test_how_a_command_ended_is_told(code, said, verdict):
    assert Outcome(code, said).verdict == verdict


def test_a_worker_makes_call_after_call_and_outlives_its_child(monkeypatch):
    def spin(words):
        while True:
            pass

    monkeypatch.setitem(CALLS_OF, "spin", spin)
    worker = Worker()
    assert [worker.run([word]).verdict for word in ("--version", "nosuch", "--version")] == ["done", "refused", "done"]
    assert worker.run([], name="spin", seconds=0.1).verdict == "slow"
    assert worker.run(["--version"]).said == f"attnres {attnres.__version__}\n"
    worker.close()


@pytest.mark.long
def test_a_traceback_and_a_slow_command_are_noticed():
    def fail():
        raise RuntimeError("outside of what the command catches")

    def sleep():
        import time

        time.sleep(60)

    assert forked(["--version"]).verdict == "done" and forked(["nosuch"]).verdict == "refused"
    assert forked(["--version"], inside=fail).verdict == "traceback"
    assert forked(["--version"], inside=sleep, seconds=0.2).verdict == "slow"


def test_damage_is_a_function_of_its_seed_and_changes_most_files():
    content = b'{"a": [1, 2, {"b": null}], "c": "text", "d": 0.5}\n' * 3
    for kind in ("json", "jsonl", "text", "binary"):
        damaged = [mutate(content[:50] if kind == "json" else content, random.Random(i), kind) for i in range(60)]
        assert damaged == [
            mutate(content[:50] if kind == "json" else content, random.Random(i), kind) for i in range(60)
        ]
        assert len(set(damaged)) > 25


def test_a_tally_goes_on_where_it_stopped(tmp_path):
    tally = Tally(tmp_path / "a" / "tally.json")
    tally.count("inputs", "done")
    tally.count("inputs", "traceback", "a file", said="Traceback")
    tally.save()
    later = Tally(tmp_path / "a" / "tally.json")
    assert later.tried("inputs") == 2 and later.tried("flags") == 0
    assert [failure["what"] for failure in later.failures("inputs")] == ["a file"]
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n## Counts\n\nof long ago\n")
    later.write_into(page)
    assert "of long ago" not in page.read_text() and page.read_text().startswith("# Title\n\n## Counts\n\nOf ")
    assert "| inputs | 2 | 1 done, 1 traceback | 1 |" in page.read_text()


def test_damaged_files_and_hostile_flags_end_in_a_sentence(material: Material):
    tally = Tally()
    try_inputs(material, tally, 30, quick=True)
    try_flags(material, tally, 8)
    assert tally.failures() == []
    assert tally.record["areas"]["inputs"]["refused"] > 8 and len(tally.record["kinds"]) > 20


def test_every_document_of_made_up_folders_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tally = Tally()
    try_folders(Material(tmp_path), tally, 150)
    assert tally.record["areas"]["folders"] == {"tried": 150, "done": 150}, tally.failures()[:1]
    monkeypatch.setattr("attnres.data.folder._split_of", lambda path: None)
    try_folders(Material(tmp_path), lost := Tally(), 20)
    assert lost.failures(), "a test split that is read is noticed"


@pytest.mark.long
def test_commands_killed_between_two_changes_end_as_if_they_had_not_been(material: Material):
    tally = Tally()
    try_kills(material, tally, 6, only=("prepare", "convert"))
    assert tally.failures() == [] and tally.tried("kills") >= 3 and tally.tried("killed and resumed") > 0


@pytest.mark.long
def test_a_full_disk_is_a_sentence_and_costs_nothing(material: Material):
    tally = Tally()
    try_full_disks(material, tally, 4, only=("convert",))
    assert tally.failures() == [] and tally.record["areas"]["full disks"]["refused"] > 2


@pytest.mark.long
def test_the_full_disk_fails_from_its_write_on(tmp_path: Path):
    code = (
        "import sys, pathlib; from fuzz.disk import FullDisk; root = pathlib.Path(sys.argv[1])\n"
        "FullDisk(root, 1).install(); (root / 'a').mkdir(); print('one')\n"
        "try:\n    (root / 'b').mkdir()\nexcept OSError as error:\n    print(error.strerror)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout == f"one\n{os.strerror(28)}\n" and FullDisk(tmp_path, 3).left == 3


def test_an_audit_that_looked_nothing_up_is_none():
    whole, weak = {"name": "a", "version": "1", "vulns": []}, {"id": "PYSEC-1", "fix_versions": ["2"]}
    assert judged([whole]) == ("No known vulnerabilities in 1 packages.", 0)
    text, status = judged([whole, {"name": "b", "skip_reason": "no network"}])
    assert status == 2 and "1 of 2 packages could not be looked up (b" in text
    assert judged([{**whole, "vulns": [weak]}]) == ("Known vulnerabilities:\na 1: PYSEC-1, mended in 2", 1)
