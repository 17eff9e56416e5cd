"""Training runs in processes of their own: started, watched, stopped together.

Each run has a process to itself so that its peak memory is its own.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import attnres
from attnres.errors import Interrupted, UserError
from attnres.residuals.registry import PLUGINS, plugins
from attnres.training.interrupt import Signals, caught_signals

ERROR_FILE = "ATTNRES_ERROR_FILE"
"""Environment variable: where `attnres` writes the sentence of a user error instead of printing it."""
POLL_S = 0.2
PATIENCE_S = 10.0
"""How long a child that was told to end may take when its parent fails, before it is killed."""


@dataclass
class Child:
    """One run, and its process once it is started."""

    name: str
    folder: Path
    config: Path
    steps: int
    process: subprocess.Popen | None = None
    log: Path | None = None
    began: float = 0.0

    def start(self, *, threads: int, log: Path | None) -> None:
        """Start it with so many threads, its output in `log` (None: shown as it comes). Raises UserError."""
        environment = {**os.environ, ERROR_FILE: str(self._error_file)}
        # The same package as this process's, wherever it was imported from.
        paths = [str(Path(attnres.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["OMP_NUM_THREADS"] = str(threads)
        environment[PLUGINS] = plugins()  # a configuration names a file and runs none
        self._error_file.unlink(missing_ok=True)
        self.log, self.began = log, time.monotonic()
        with contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                try:
                    log.parent.mkdir(parents=True, exist_ok=True)
                    output = stack.enter_context(log.open("ab"))
                except OSError as error:
                    raise UserError(
                        f"cannot write {log}: {error.strerror}; every run keeps its last checkpoint, make room"
                    ) from error
            # In a session of its own: a Ctrl-C reaches it through this process, once, and not also from the terminal.
            self.process = subprocess.Popen(
                self.command(quiet=log is not None),
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def command(self, *, quiet: bool) -> list[str]:
        command = [sys.executable, "-m", "attnres", "train", "--config", str(self.config), "--resume"]
        return [*command, "--no-progress"] if quiet else command

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int:
        assert self.process is not None
        return int(self.process.returncode)

    def tell(self, number: int) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def latest(self) -> tuple[int, float | None]:
        """The last training step in its metrics and the loss there; 0 and None before the first."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                lines = file.read().splitlines()
        except OSError:
            return 0, None
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                if record["kind"] == "train":
                    return int(record["step"]), float(record["loss"])
        return 0, None

    def failure(self) -> UserError:
        """Why it failed, in its own words where it had any."""
        with contextlib.suppress(OSError):
            message = self._error_file.read_text(encoding="utf-8").strip()
            self._error_file.unlink()
            if message:
                return UserError(f"{self.name}: {message}")
        where = f"see {self.log}" if self.log is not None else "see its messages above"
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name} (out of memory?)"
        else:
            how = f"ended with exit status {self.code}"
        return UserError(f"{self.name} {how}, {where}; the same command continues from its last checkpoint")

    @property
    def _error_file(self) -> Path:
        return self.config.with_suffix(".error")


def run_children(
    children: list[Child],
    *,
    jobs: int,
    threads: int,
    on_start: Callable[[Child], None],
    on_end: Callable[[Child], None],
    on_poll: Callable[[list[Child]], None],
    log_of: Callable[[Child], Path | None],
) -> None:
    """Run all of them, `jobs` at once with `threads` each.

    Raises:
        UserError: one failed or could not be started; the others were told to save and stop.
        Interrupted: Ctrl-C or SIGTERM; the running ones saved and stopped.
    """
    waiting, running = list(children), []
    failed: Child | None = None
    with caught_signals() as signals:
        told = 0
        try:
            while running or (waiting and not told):
                while waiting and len(running) < jobs and not told:
                    child = waiting.pop(0)
                    on_start(child)
                    child.start(threads=threads, log=log_of(child))
                    running.append(child)
                time.sleep(POLL_S)
                on_poll(running)
                for child in [child for child in running if not child.running]:
                    running.remove(child)
                    if child.code == 0:
                        on_end(child)
                    elif not told:
                        failed = child
                if not told and (wanted := _wanted(signals, failed)):
                    told = wanted
                    for child in running:
                        child.tell(told)
        finally:
            _end(running)
        if signals.interrupts or signals.terminations:
            code = 130 if signals.interrupts else 143
            raise Interrupted("stopped, every run saved: give the same command again to continue", code)
    if failed is not None:
        if failed.code in (130, 143):
            raise Interrupted(f"{failed.name} was stopped and saved: give the same command to continue", failed.code)
        raise failed.failure()


def _wanted(signals: Signals, failed: Child | None) -> int:
    """The signal to pass on to the running children, 0 for none."""
    if signals.terminations:
        return signal.SIGTERM
    return signal.SIGINT if signals.interrupts or failed is not None else 0


def _end(running: list[Child]) -> None:
    """Leave no child behind: only a second Ctrl-C or a bug comes here with some still running."""
    for child in running:
        child.tell(signal.SIGTERM)
    for child in running:
        if child.process is None:
            continue
        try:
            child.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
