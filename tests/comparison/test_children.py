"""Runs in processes of their own: how many at once, what a failure or a Ctrl-C does. Scripts stand for training."""

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass

import pytest
from rich.console import Console

from attnres.comparison.children import Child, Watch, run_children
from attnres.comparison.watch import Ended, ProgressRate, train_all
from attnres.errors import Interrupted, UserError
from attnres.progress import grid

SAVES_ON_CTRL_C = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("{saved}").write_text("saved")
    sys.exit(130)
signal.signal(signal.SIGINT, save)
pathlib.Path("{ready}").write_text("")
for _ in range(1200):  # one long sleep is not interrupted by a signal that comes just before it begins
    time.sleep(0.05)
"""


@dataclass
class Script(Child):
    source: str = ""

    def command(self, *, quiet):
        return [sys.executable, "-S", "-c", self.source]


def script(tmp_path, name, source, **fields):
    return Script(name, tmp_path / name, tmp_path / f"{name}.json", steps=10, source=source, **fields)


class Noted(Watch):
    def __init__(self, on_poll, log_of):
        self.events, self.poll, self.log_of = [], on_poll, log_of

    def start(self, child):
        self.events.append(f"+{child.name}")

    def end(self, child):
        self.events.append(f"-{child.name}")


def run(children, jobs=1, until=math.inf, on_poll=lambda running: None, log_of=lambda child: None):
    watch = Noted(on_poll, log_of)
    run_children(children, watch, jobs=jobs, until=until)
    return watch.events


def test_one_after_the_other(tmp_path):
    assert run([script(tmp_path, name, "pass") for name in "ab"]) == ["+a", "-a", "+b", "-b"]


def test_what_stands_is_told_after_each_run_but_the_last(tmp_path, capsys):
    table, ends = grid("run"), []
    table.add_row("as it stands")
    train_all(
        *([script(tmp_path, name, "pass") for name in "abc"], []),
        jobs=2,
        say=Console(),
        status=lambda: table,
        on_end=lambda child: ends.append(child.name),
    )
    assert sorted(ends) == ["a", "b", "c"] and capsys.readouterr().out.count("as it stands") == 2


def test_the_time_left_is_by_how_much_there_is_to_compute(tmp_path, capsys):
    small, large = script(tmp_path, "a", "pass"), script(tmp_path, "b", "pass", size=100.0)
    train_all([small, large], [Ended("c", 1.0, 60.0)], jobs=1, say=Console())
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("run "))
    assert first == "run 2/3 a, about 1 h 41 min left in all", "101 of what took a minute"
    assert "run 3/3 b, about 5" in second, "a took no time: 100 at half a minute each"


def test_threads_that_wait_leave_their_core_to_others(tmp_path):
    beside, alone = script(tmp_path, "a", "pass"), script(tmp_path, "b", "pass", threads=2)
    assert beside.variables()["OMP_WAIT_POLICY"] == "passive" and "OMP_WAIT_POLICY" not in alone.variables()


def test_nothing_is_imported_from_the_folder_that_a_run_is_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("open('planted', 'w')")
    assert run([script(tmp_path, "a", "import colorsys")]) == ["+a", "-a"] and not (tmp_path / "planted").exists()


def test_a_run_is_reckoned_by_those_of_other_seeds():
    rate = ProgressRate({"quick-seed1": 1.0, "slow-seed1": 1.0, "other-seed0": 1.0})
    rate.left |= {"quick-seed0": 1.0, "slow-seed0": 0.5}  # half of it was there before
    rate.ended("quick-seed0", 10.0)
    assert rate.seconds_left == pytest.approx(3.5 * 10)
    rate.ended("slow-seed0", 50.0)
    assert rate.seconds_left == pytest.approx(10 + 100 + 60 / 1.5)


def test_what_is_left_of_a_run_is_what_its_steps_say(tmp_path):
    child = script(tmp_path, "a", "pass", size=8.0)
    assert child.left == 8.0
    child.folder.mkdir(exist_ok=True)
    (child.folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": child.steps // 4, "loss": 1.0}))
    assert child.left == pytest.approx(8.0 * (1 - (child.steps // 4) / child.steps))


def test_none_begins_when_the_time_is_over(tmp_path):
    ready = tmp_path / "ready"
    first = script(tmp_path, "a", f"import pathlib; pathlib.Path('{ready}').write_text('')")
    assert run([first], until=time.monotonic() + 60) == ["+a", "-a"] and ready.exists()
    assert run([script(tmp_path, "b", "pass")], until=time.monotonic() - 1) == []


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1", "2"]), ("5,6,7", ["5", "6", "7"])])
def test_on_several_gpus_each_run_has_one(tmp_path, monkeypatch, visible, names):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    source = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    children = [script(tmp_path, name, source) for name in "abc"]
    run(children, jobs=3, log_of=lambda child: tmp_path / f"{child.name}.log")
    assert [(tmp_path / f"{name}.log").read_text().strip() for name in "abc"] == names


def test_a_run_that_names_its_gpu_sees_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    source = "import os; print('CUDA_VISIBLE_DEVICES' in os.environ)"
    run([script(tmp_path, "a", source, names_gpu=True)], log_of=lambda child: tmp_path / "a.log")
    assert (tmp_path / "a.log").read_text().strip() == "False"


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_has_the_threads_it_is_given(tmp_path, jobs):
    source = "import os; print(os.environ['OMP_NUM_THREADS'])"
    children = [script(tmp_path, name, source, threads=5) for name in "abc"]
    events = run(children, jobs=jobs, log_of=lambda child: tmp_path / "logs" / f"{child.name}.log")
    assert events[:3] == (["+a", "+b", "+c"] if jobs == 3 else ["+a", "-a", "+b"])
    assert (tmp_path / "logs" / "b.log").read_text().strip() == "5"


def test_a_log_that_cannot_be_written_stops_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("attnres.comparison.children.PATIENCE_S", 60.0)  # a machine with much else to do
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    source = SAVES_ON_CTRL_C.replace("signal.SIGINT", "signal.SIGTERM").format(saved=saved, ready=ready)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "b.log").mkdir()

    def log_of(child):
        while child.name == "b" and not ready.exists():
            time.sleep(0.02)
        return tmp_path / "logs" / f"{child.name}.log"

    with pytest.raises(UserError, match=r"cannot write .*b\.log: Is a directory"):
        run([script(tmp_path, "a", source), script(tmp_path, "b", "pass")], jobs=2, log_of=log_of)
    assert saved.read_text() == "saved"


def test_a_failed_run_speaks_for_itself_and_stops_the_others(tmp_path):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    patient = script(tmp_path, "patient", SAVES_ON_CTRL_C.format(saved=saved, ready=ready))
    fails = (
        "import os, pathlib, sys, time\n"
        f"while not pathlib.Path('{ready}').exists(): time.sleep(0.02)\n"
        "pathlib.Path(os.environ['ATTNRES_ERROR_FILE']).write_text('lr is -1: it must be above 0')\n"
        "sys.exit(2)"
    )
    with pytest.raises(UserError, match="broken: lr is -1: it must be above 0"):
        run([patient, script(tmp_path, "broken", fails), script(tmp_path, "never", "pass")], jobs=2)
    assert saved.read_text() == "saved"
    assert not list(tmp_path.glob("*.error"))


def test_where_runs_are_alone_the_others_go_on(tmp_path, capsys):
    """Up to three failures, the first of which is told at the end."""
    fails = [script(tmp_path, f"broken{i}", f"import sys; sys.exit({3 + i})", is_alone=True) for i in range(3)]
    fine = [script(tmp_path, name, "pass", is_alone=True) for name in "ab"]
    with pytest.raises(UserError, match=r"broken0 ended with exit status 3, .* \(1 more failed\)"):
        train_all([fails[0], fine[0], fails[1], fine[1]], [], jobs=1, say=Console(stderr=True))
    said = capsys.readouterr().err
    assert "broken0 failed in" in said and said.count("the others go on") == 2 and "run 4/4 b" in said
    with pytest.raises(UserError, match=r"\(2 more failed\)"):
        train_all([*fails, fine[0]], [], jobs=1, say=Console(stderr=True))
    assert "run 4/4" not in capsys.readouterr().err


def test_a_crash_is_told_with_its_exit_status(tmp_path):
    with pytest.raises(UserError, match="broken ended with exit status 3, see its messages above"):
        run([script(tmp_path, "broken", "raise SystemExit(3)")])
    with pytest.raises(UserError, match=r"broken was ended by SIGKILL \(out of memory\?\), see .*broken.log"):
        run(
            [script(tmp_path, "broken", "import os; os.kill(os.getpid(), 9)")],
            log_of=lambda child: tmp_path / f"{child.name}.log",
        )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_run_once_and_it_saves(tmp_path, number, code):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    source = SAVES_ON_CTRL_C.replace("signal.SIGINT", f"signal.Signals({int(number)})")
    sent = []

    def interrupt(running):
        if ready.exists() and not sent:
            sent.append(True)
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="give the same command again to continue") as error:
        run(
            [script(tmp_path, "a", source.format(saved=saved, ready=ready)), script(tmp_path, "b", "pass")],
            on_poll=interrupt,
        )
    assert error.value.code == code
    assert saved.read_text() == "saved"


def test_a_second_ctrl_c_leaves_no_process_behind(tmp_path):
    ready = tmp_path / "ready"
    stubborn = (
        "import pathlib, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path('{ready}').write_text('')\ntime.sleep(60)"
    )
    child = script(tmp_path, "stubborn", stubborn)

    def interrupt(running):
        if ready.exists():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run([child], on_poll=interrupt)
    assert not child.running


def test_the_latest_step_comes_from_the_last_whole_training_line(tmp_path):
    child = script(tmp_path, "a", "")
    assert child.latest() == (0, None)
    train(child, 10, 2.5)
    with (child.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "val", "step": 10, "loss": 2.0}\n{"kind": "train", "st')
    assert child.latest() == (10, 2.5)


def train(child, step, loss):
    child.folder.mkdir(exist_ok=True)
    with (child.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "loss": loss}) + "\n")
