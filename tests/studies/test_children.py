"""Runs in processes of their own: how many at once, what a failure or a Ctrl-C does. Scripts stand for training."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import pytest

from attnres.errors import UserError
from attnres.studies.children import Child, available_cores, run_children
from attnres.train.interrupt import Interrupted

SAVES_ON_CTRL_C = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("{saved}").write_text("saved")
    sys.exit(130)
signal.signal(signal.SIGINT, save)
pathlib.Path("{ready}").write_text("")
time.sleep(60)
"""


@dataclass
class Script(Child):
    source: str = ""

    def command(self, *, quiet):
        return [sys.executable, "-S", "-c", self.source]


def script(tmp_path, name, source):
    return Script(name, tmp_path / name, tmp_path / f"{name}.json", steps=10, source=source)


def run(children, jobs=1, on_poll=lambda running: None, log_of=lambda child: None):
    events = []
    run_children(
        children,
        jobs=jobs,
        on_start=lambda child: events.append(f"+{child.name}"),
        on_end=lambda child: events.append(f"-{child.name}"),
        on_poll=on_poll,
        log_of=log_of,
    )
    return events


def test_one_after_the_other(tmp_path):
    assert run([script(tmp_path, name, "pass") for name in "ab"]) == ["+a", "-a", "+b", "-b"]


def test_several_at_once_share_the_threads(tmp_path):
    source = "import os; print(os.environ['OMP_NUM_THREADS'])"
    children = [script(tmp_path, name, source) for name in "abc"]
    events = run(children, jobs=3, log_of=lambda child: tmp_path / "logs" / f"{child.name}.log")
    assert events[:3] == ["+a", "+b", "+c"]
    assert (tmp_path / "logs" / "b.log").read_text().strip() == str(max(1, available_cores() // 3))


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


def test_a_crash_is_told_with_its_exit_status(tmp_path):
    with pytest.raises(UserError, match="broken ended with exit status 3, see its messages above"):
        run([script(tmp_path, "broken", "raise SystemExit(3)")])
    with pytest.raises(UserError, match=r"broken was killed by SIGKILL \(out of memory\?\), see .*broken.log"):
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


def test_the_step_comes_from_the_last_whole_line(tmp_path):
    child = script(tmp_path, "a", "")
    assert child.step() == 0
    child.folder.mkdir()
    (child.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 10}\n{"kind": "train", "st')
    assert child.step() == 10
