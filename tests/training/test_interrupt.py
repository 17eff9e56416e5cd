"""A run of a comparison that was killed ends too, and saves."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnres.training import interrupt

CHILD = """
import importlib.util, signal, sys, time
spec = importlib.util.spec_from_file_location("interrupt", sys.argv[1])  # itself: torch takes seconds to load
interrupt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupt)
interrupt.LOOK_S = 0.02
def stop(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
interrupt.end_with_parent()
print("going on", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
environment = {**os.environ, sys.argv[1]: str(os.getpid())}
subprocess.Popen([sys.executable, "-S", "-c", *sys.argv[2:]], env=environment)
time.sleep(60)
"""


def test_a_run_ends_when_the_process_that_started_it_is_killed():
    file = str(Path(interrupt.__file__))
    command = [sys.executable, "-S", "-c", PARENT, interrupt.PARENT, CHILD, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "going on\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.readline() == "saved\n"


def test_a_run_of_its_own_does_not_look_for_a_parent(monkeypatch):
    for name in (interrupt.PARENT, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(interrupt.threading, "Thread", lambda **_: pytest.fail("it looks"))
    interrupt.end_with_parent()
    monkeypatch.setenv(interrupt.PARENT, "no number")
    interrupt.end_with_parent()
