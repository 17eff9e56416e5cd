"""Calls in forked children of one process that has the libraries loaded: a child each, or one child for many calls."""

import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TRACEBACK = 99
"""Exit status of a call that ended with an exception: a traceback, outside this campaign."""
WALL = 10
"""How many times the seconds of work that a call may take it may take on a clock: the machine has other work too."""
CALLS = 150
"""After so many a worker's child is a new one."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Outcome:
    """How a call ended: its exit status (None: it was ended after the time it had) and what it printed."""

    code: int | None
    said: str

    @property
    def verdict(self) -> str:
        """`done`, `refused` in a sentence, `unforeseen` (a sentence, and a bug), `traceback`, or `slow`."""
        if self.code is None:
            return "slow"
        if self.code == TRACEBACK or self.code < 0 or "Traceback (most recent call last)" in self.said:
            return "traceback"
        if self.code in (2, 130, 143):
            last = self.said.strip().splitlines()[-1:] or [""]
            return "refused" if last[0].startswith("attnres: ") else "traceback"
        return {0: "done", 1: "unforeseen"}.get(self.code, "traceback")


def preload() -> None:
    """Load what most commands load, once, and start no thread that a fork would lose."""
    import torch

    import attnres.comparison.compare
    import attnres.evals.run
    import attnres.figures.draw
    import attnres.models.export
    import attnres.report.page
    import attnres.training.loop  # noqa: F401

    torch.set_num_threads(1)


def command(words: list[str]) -> None:
    """Carry out `attnres WORDS` in this process, or `python -m lab` with the words after "study"."""
    from attnres.cli import main
    from lab.__main__ import main as lab

    lab(words[1:]) if words[:1] == ["study"] else main(words)


def table(words: list[str]) -> None:
    """Read runs as `attnres report` does, and print the table and the headline: all of it but the figures."""
    from rich.console import Console

    from attnres.report.columns import print_table
    from attnres.report.headline import headline
    from attnres.report.runs import load_study
    from attnres.report.table import build_table

    study = load_study(*map(Path, words))
    built = build_table(study)
    print_table(built, headline(study, built), Console())


def forked(
    words: list[str],
    *,
    seconds: float = 60,
    inside: Callable[[], None] | None = None,
    cwd: Path | None = None,
    call: Callable[[list[str]], None] = command,
) -> Outcome:
    """Make a call in a forked child of its own.

    Args:
        seconds: of work it may take, before it is killed.
        inside: is called in the child first.
        cwd: where it runs.
    """
    with tempfile.TemporaryFile("w+b") as said:
        child = _fork(lambda: _leave(said.fileno(), lambda: _status(call, words, inside, cwd)))
        code = wait(child, seconds)
        said.seek(0)
        return Outcome(code, said.read().decode("utf-8", "replace"))


def started(words: list[str], inside: Callable[[], None] | None = None) -> int:
    """Start `attnres WORDS` in a forked child, silent and in a session of its own; returns its number."""

    def life() -> int:
        with open(os.devnull, "wb") as nothing:
            return _leave(nothing.fileno(), lambda: _status(command, words, inside, None))

    return _fork(life)


class Worker:
    """One forked child that makes call after call, so that a call costs no fork."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._calls = 0

    def run(self, words: list[str], *, seconds: float = 30, cwd: Path | None = None, name: str = "command") -> Outcome:
        """Make the call of this name (`CALLS_OF`); the child is killed, and the next one is new, after so many seconds
        of work."""
        if self._child is None or self._calls >= CALLS:
            self.close()
            self._open()
        assert self._child is not None
        self._calls += 1
        self._line.write(json.dumps({"name": name, "words": words, "cwd": None if cwd is None else str(cwd)}) + "\n")
        self._line.flush()
        began, until = _worked(self._child), time.monotonic() + WALL * seconds
        while not select.select([self._socket], [], [], 0.2)[0]:
            if _worked(self._child) - began > seconds or time.monotonic() > until:
                os.kill(self._child, signal.SIGKILL)
                return self._ended(None)
        answer = self._line.readline()
        if answer:
            return Outcome(**json.loads(answer))
        return self._ended(0)

    def _ended(self, code: int | None) -> Outcome:
        """What the child printed before it was killed (None) or ended by itself."""
        status = self._wait()
        heard = self._heard()
        for part in (self._line, self._socket, self._said):
            part.close()
        return Outcome(code if code is None else status, heard)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._line.close()
            self._socket.close()
            self._wait()
            self._said.close()

    def _open(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (open as long as the child)
        self._child, self._calls = _fork(lambda: self._serve(theirs)), 0
        theirs.close()
        self._line = self._socket.makefile("rw", encoding="utf-8")

    def _serve(self, ours: socket.socket) -> int:
        """The child's life: a line with a call in, a line with its outcome out."""
        self._socket.close()
        said = self._said

        def serve() -> int:
            home = os.getcwd()
            with ours.makefile("rw", encoding="utf-8") as line:
                for asked in line:
                    call = json.loads(asked)
                    said.seek(0)
                    said.truncate()
                    environment = dict(os.environ)
                    code = _status(CALLS_OF[call["name"]], call["words"], None, call["cwd"])
                    for stream in (sys.stdout, sys.stderr):
                        stream.flush()
                    os.chdir(home)
                    os.environ.clear()
                    os.environ.update(environment)
                    line.write(json.dumps({"code": code, "said": self._heard()}) + "\n")
                    line.flush()
            return 0

        return _leave(said.fileno(), serve)

    def _heard(self) -> str:
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace")

    def _wait(self) -> int:
        assert self._child is not None
        _, status = os.waitpid(self._child, 0)
        self._child = None
        return os.waitstatus_to_exitcode(status)


CALLS_OF = {"command": command, "table": table}


def wait(child: int, seconds: float) -> int | None:
    """The child's exit status, negative for a signal; None where it had to be killed after so many seconds of work."""
    until = time.monotonic() + WALL * seconds
    pause = 0.002
    while time.monotonic() < until and _worked(child) <= seconds:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _worked(child: int) -> float:
    """Seconds of processor time that a process has had."""
    fields = Path(f"/proc/{child}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _fork(life: Callable[[], int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the parent hold no lock of ours
        child = os.fork()
    if child == 0:
        code = TRACEBACK
        try:
            os.setsid()
            code = life()
        finally:
            os._exit(code)
    return child


def _leave(said: int, body: Callable[[], int]) -> int:
    """The status of `body`, what it prints written to a file."""
    for number in (1, 2):
        os.dup2(said, number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)
    try:
        return body()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _status(
    call: Callable[[list[str]], None],
    words: list[str],
    inside: Callable[[], None] | None,
    cwd: str | Path | None,
) -> int:
    """The exit status of a call in this process; what escapes it is printed with its traceback."""
    from attnres.errors import UserError

    try:
        if cwd is not None:
            os.chdir(cwd)
        if inside is not None:
            inside()
        call(words)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except UserError as error:  # of a call that is no command
        print(f"attnres: error: {error}", file=sys.stderr)
        return 2
    except BaseException:
        traceback.print_exc()
        return TRACEBACK
    return 0
