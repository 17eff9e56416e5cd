"""metrics.jsonl is appended to, cut back on resuming, and mirrored in a tracker if asked."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from attnres.errors import UserError
from attnres.train.metrics import Metrics, Tracker, read


def test_lines_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write("train", step, loss=float(step))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    again = Metrics(tmp_path, step=2)
    again.write("val", 3, loss=0.5)
    again.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss": 1.0},
        {"kind": "train", "step": 2, "loss": 2.0},
        {"kind": "val", "step": 3, "loss": 0.5},
    ]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    Metrics(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == "" and read(tmp_path / "nothing") == []


@pytest.mark.parametrize("content", ["hello\n", "[1]\n", '{"kind": "train"}\n', '{"step": 1}\n'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"line 1 of .* is not one of our metrics"):
        Metrics(tmp_path)


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UserError, match=f"--track {kind} needs the package {kind}: pip install {kind}"):
        Tracker(kind, tmp_path, "run", {})


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        Tracker("wandbb", tmp_path, "run", {})


class FakeRun:
    def __init__(self, **given: Any):
        self.given, self.seen, self.open = given, [], True

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
    tracker = Tracker(kind, tmp_path, "run", {"seed": 1})
    metrics = Metrics(tmp_path, tracker=tracker)
    metrics.write("depth", 3, output_rms=[1.0, 2.0])
    metrics.close()
    seen: dict[str, float] = {}
    for step, values in tracker.run.seen:
        assert step == 3
        seen |= values
    assert seen == {"depth/output_rms/0": 1.0, "depth/output_rms/1": 2.0} and not tracker.run.open


def test_a_tracker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("fake")

    def refuse(**_: Any) -> None:
        raise RuntimeError("no key")

    fake.__dict__["init"] = refuse
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UserError, match=r"wandb does not start \(no key\)"):
        Tracker("wandb", tmp_path, "run", {})
