"""metrics.jsonl is appended to, cut back on resuming, and mirrored in a tracker if asked."""

import errno
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnres.errors import UserError
from attnres.training import TrainConfig, train
from attnres.training.records import Metrics, Tracker, read_metrics


def test_lines_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write("train", step, loss=float(step))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    again = Metrics(tmp_path, step=2)
    again.write("val", 3, loss=0.5)
    again.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss": 1.0},
        {"kind": "train", "step": 2, "loss": 2.0},
        {"kind": "val", "step": 3, "loss": 0.5},
    ]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    Metrics(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == "" and read_metrics(tmp_path / "nothing") == []


@pytest.mark.parametrize("content", ["hello\n", "[1]\n", '{"kind": "train"}\n', '{"step": 1}\n'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"^line 1 of .*metrics.jsonl is (damaged|not valid JSON)"):
        Metrics(tmp_path)


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UserError, match=f"--track {kind} needs the package {kind}: pip install {kind}"):
        Tracker(kind, tmp_path, "run", "a1", {})


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        Tracker("wandbb", tmp_path, "run", "a1", {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_closing_says_nothing_more(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.file.close()
    metrics.file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(UserError, match="No space left on device; the last checkpoint is intact"):
        metrics.write("train", 1, loss=1.0)
    metrics.close()
    assert metrics.file.closed


def test_a_file_that_cannot_be_opened_or_synced_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics = Metrics(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left"):
        patch.setattr(os, "fsync", full)
        metrics.sync()
    metrics.close()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left"):
        patch.setattr("attnres.training.records.write_text", lambda *_: None)
        patch.setattr(Path, "open", full)
        Metrics(tmp_path)


class FakeRun:
    def __init__(self, **arguments: Any):
        self.given, self.seen, self.open = arguments, [], True

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((step, values))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((step, {name: value}))

    def finish(self) -> None:
        self.open = False

    close = finish


@pytest.mark.parametrize("kind", ["trackio", "wandb", "tensorboard"])
def test_a_tracker_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fake = types.ModuleType("fake")
    for maker in ("init", "SummaryWriter"):
        setattr(fake, maker, FakeRun)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if kind == "tensorboard" else kind, fake)
    tracker = Tracker(kind, tmp_path, "run", "a1", {"seed": 1})
    metrics = Metrics(tmp_path, tracker=tracker)
    metrics.write("depth", 3, output_rms=[1.0, 2.0])
    metrics.close()
    seen: dict[str, float] = {}
    for step, values in tracker.run.seen:
        assert step == 3
        seen |= values
    assert seen == {"depth/output_rms/0": 1.0, "depth/output_rms/1": 2.0} and not tracker.run.open


@pytest.mark.long
@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_a_tracker_knows_a_run_again_and_takes_no_other_of_its_name_for_it(
    configure: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever its folder is called: it may be renamed, and another machine has one of that name."""
    begun: list[str] = []

    def init(**given: Any) -> FakeRun:
        begun.append(given["name"] if kind == "trackio" else given["id"])
        return FakeRun()

    fake = types.ModuleType("fake")
    fake.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, kind, fake)
    for resume in (False, True):
        train(configure(track=kind, steps=2, resume=resume), progress=False)
        (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    train(configure(track=kind, steps=2), progress=False)
    train(configure("elsewhere", track=kind, steps=2, resume=True), progress=False)
    assert begun[0] == begun[1] == begun[3] != begun[2]


@pytest.mark.long
def test_a_tracker_that_does_not_start_leaves_no_run(
    configure: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**given: Any) -> None:
        (Path(given["dir"]) / "wandb").mkdir()
        raise RuntimeError("not logged in")

    fake = types.ModuleType("fake")
    fake.__dict__["init"] = refuse
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UserError, match=r"wandb does not start \(not logged in\)"):
        train(configure(track="wandb"), progress=False)
    assert not (tmp_path / "run").exists()
    assert train(configure(steps=2), progress=False)["step"] == 2


def test_a_tracker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("fake")

    def refuse(**_: Any) -> None:
        raise RuntimeError("no key")

    fake.__dict__["init"] = refuse
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UserError, match=r"wandb does not start \(no key\)"):
        Tracker("wandb", tmp_path, "run", "a1", {})


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_tracker_that_fails_later_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    class Down(FakeRun):
        def log(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("no network")

        add_scalar = finish = close = log

    fake = types.ModuleType("fake")
    for maker in ("init", "SummaryWriter"):
        setattr(fake, maker, Down)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if kind == "tensorboard" else kind, fake)
    metrics = Metrics(tmp_path, tracker=Tracker(kind, tmp_path, "run", "a1", {}))
    for step in (1, 2):
        metrics.write("train", step, loss=1.0)
    metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert capsys.readouterr().err == f"{kind} failed (no network): the run continues, its metrics.jsonl is complete\n"
