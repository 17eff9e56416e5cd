"""Command lines in forked children of one process that has the libraries loaded: hundreds in a minute."""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

TRACEBACK = 99
"""Exit status of a child that ended with an exception: a traceback, outside this campaign."""


@dataclass(frozen=True)
class Outcome:
    """How a command line ended: its exit status (None: it was ended after the time it had) and what it printed."""

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

    import attnres.evals.run
    import attnres.report.show
    import attnres.studies.compare
    import attnres.studies.draw
    import attnres.training.loop  # noqa: F401

    torch.set_num_threads(1)


def forked(
    words: list[str], *, seconds: float = 60, inside: Callable[[], None] | None = None, cwd: Path | None = None
) -> Outcome:
    """Run `attnres WORDS` in a forked child.

    Args:
        seconds: it may take, before it is killed.
        inside: is called in the child first.
        cwd: where it runs.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the parent hold no lock of ours
            child = os.fork()
        if child == 0:
            _run(words, said.fileno(), inside, cwd)
        code = _wait(child, seconds)
        said.seek(0)
        return Outcome(code, said.read())


def _run(words: list[str], said: int, inside: Callable[[], None] | None, cwd: Path | None) -> None:
    """The child's whole life."""
    code = TRACEBACK
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)
        if cwd is not None:
            os.chdir(cwd)
        from attnres.cli import main

        if inside is not None:
            inside()
        main(words)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """The child's exit status, negative for a signal; None where it had to be killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
