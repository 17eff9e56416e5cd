"""Start, watch and stop training runs, each in a child process, so that each has a peak memory of its own."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import attnres
from attnres.errors import ERROR_FILE, Interrupted, UserError
from attnres.ops.cpu_build import SWITCH
from attnres.ops.devices import accelerator
from attnres.residuals.registry import PLUGINS, plugins
from attnres.training.interrupt import PARENT, caught_signals
from attnres.training.records import growing
from attnres.training.run_folder import DIVERGED

POLL_S = 0.2
STOPPED = (130, 143)
"""Exit statuses of a run that was told to stop and saved a checkpoint."""
FAILURES = 3
"""Independent runs (`Child.is_alone`) that may fail before all others are stopped."""
PATIENCE_S = 10.0
"""Seconds that a child has to end, when its parent fails, before it is killed."""


@dataclass
class Child:
    """A training run, and its process once it is started."""

    name: str
    folder: Path
    config: Path
    steps: int
    size: float = 1.0  # amount of computation relative to the other runs, in any unit
    threads: int = 1
    kernels: bool | None = None  # whether the C kernels are used on a CPU; None leaves it to the environment
    process: subprocess.Popen | None = None
    log: Path | None = None
    began: float = 0.0
    names_gpu: bool = False  # its configuration names a GPU by index, so its process has to see all of them
    is_alone: bool = False  # the other runs continue if this one diverges or fails
    saves: bool = True  # it saves a checkpoint when it is stopped
    has_failed: bool = False  # failed, while `is_alone` lets the others continue
    first: int = 0  # first step that it trains itself; other runs trained the steps before

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the child's process has in addition to this process's."""
        variables = {ERROR_FILE: str(self._error_file.resolve()), "OMP_NUM_THREADS": str(self.threads)}
        # The child imports the package that this process imports, wherever it lies.
        # an empty entry of PYTHONPATH would mean the current folder
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join([str(Path(attnres.__file__).parent.parent), *filter(None, inherited)])
        variables["PYTHONSAFEPATH"] = "1"  # `python -m` would import from the current folder first
        # Other runs use the other cores: a run that began with more threads must not spin-wait there.
        if self.threads == 1:
            variables["OMP_WAIT_POLICY"] = "passive"
        if self.kernels is not None:
            variables[SWITCH] = "1" if self.kernels else "0"
        variables[PLUGINS] = plugins()  # with these the child knows the mechanisms of files that this process ran
        return variables

    def start(self, *, log: Path | None, gpu: str | None = None) -> None:
        """Start the process, with its output in `log` (None: shown as it comes) and, if `gpu` is given, with only that
        GPU visible. Raises UserError."""
        environment = {**os.environ, **self.variables(), PARENT: str(os.getpid())}
        if gpu is not None and (row := accelerator()) is not None:
            environment[row.visible] = gpu
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
                        f"cannot write {log}: {error.strerror}; every run still has its last checkpoint, make room"
                    ) from error
            # In a session of its own, so that a Ctrl-C reaches it once, through this process, and not also from the
            # terminal.
            self.process = subprocess.Popen(
                self.command(quiet=log is not None),
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def command(self, *, quiet: bool) -> list[str]:
        """Return the command line of the run; `quiet` if nobody watches its output."""
        command = [sys.executable, "-m", "attnres", "train", "--config", str(self.config), "--resume"]
        return [*command, "--no-progress"] if quiet else command

    @property
    def left(self) -> float:
        """Return how much of `size` is still to be computed."""
        done = max(0, self.latest()[0] - self.first) / max(1, self.steps - self.first)
        return self.size * max(0.0, 1 - done)

    @property
    def has_diverged(self) -> bool:
        """Return whether the run diverged and the others may continue."""
        return self.is_alone and (self.folder / DIVERGED).is_file()

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
        """Return the last training step in its metrics and the loss there; 0 and None before the first."""
        with contextlib.suppress(OSError):
            if lines := growing(self.folder / "metrics.jsonl", "train", tail=16384):
                return lines[-1]
        return 0, None

    def failure(self, how: str = "", log: Path | None = None) -> UserError:
        """Return the error of a failed run: the sentence it wrote itself, else `how` and which log to look into."""
        with contextlib.suppress(OSError):
            message = self._error_file.read_text(encoding="utf-8").strip()
            self._error_file.unlink()
            if message:
                return UserError(f"{self.name}: {message}")
        log = log or self.log
        where = f"see {log}" if log is not None else "see its messages above"
        if not how and self.code < 0:
            cause = " (out of memory?)" if -self.code == signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-self.code).name}{cause}"
        how = how or f"ended with exit status {self.code}"
        next_time = "continues from its last checkpoint" if self.saves else "tries again"
        return UserError(f"{self.name} {how}, {where}; the same command {next_time}")

    @property
    def _error_file(self) -> Path:
        return self.config.with_suffix(".error")


class Watch:
    """Receives events of the runs. This base class ignores them and lets the runs' output be shown."""

    def start(self, child: Child) -> None:
        """Handle the start of a run."""

    def end(self, child: Child) -> None:
        """Handle the end of a run, or the failure of one whose failure stops no other."""

    def poll(self, running: list[Child]) -> None:
        """Update the display; called several times a second."""

    def log_of(self, child: Child) -> Path | None:
        """Return the file for a run's output; None shows the output as it comes."""
        return None


class Runner(Protocol):
    """A function that runs children: as processes on this machine, or as jobs of a cluster."""

    def __call__(self, children: list[Child], watch: Watch, *, jobs: int, until: float = math.inf) -> None: ...


def run_children(children: list[Child], watch: Watch, *, jobs: int, until: float = math.inf) -> None:
    """Run all children, `jobs` at once; start none after the moment `until` (`time.monotonic`). With several GPUs each
    child gets one.

    Raises:
        UserError: a run failed or could not be started. The others were told to save and stop, except that up to
            `FAILURES` runs with `is_alone` may fail first.
        Interrupted: Ctrl-C or SIGTERM; the running children saved and stopped.
    """
    waiting, running, failures = list(children), list[Child](), list[UserError]()
    ended, stopped = False, None
    gpus, on = _gpus(), dict[Path, str | None]()
    with caught_signals() as signals:
        signal_sent = 0
        try:
            while running or (waiting and not signal_sent):
                if time.monotonic() > until:
                    waiting.clear()
                while waiting and len(running) < jobs and not signal_sent:
                    child = waiting.pop(0)
                    watch.start(child)
                    gpus_in_use = [on[other.folder] for other in running]
                    on[child.folder] = None if child.names_gpu else min(gpus, key=gpus_in_use.count, default=None)
                    child.start(log=watch.log_of(child), gpu=on[child.folder])
                    running.append(child)
                time.sleep(POLL_S)
                watch.poll(running)
                for child in [child for child in running if not child.running]:
                    running.remove(child)
                    if child.code == 0 or child.has_diverged:
                        watch.end(child)
                    elif signal_sent or ended:
                        continue
                    elif child.code in STOPPED:
                        ended, stopped = True, child
                    elif others_go_on(child, child.failure(), failures):
                        watch.end(child)
                    else:
                        ended = True
                if not signal_sent and (signals.terminations or signals.interrupts or ended):
                    signal_sent = signal.SIGTERM if signals.terminations else signal.SIGINT
                    for child in running:
                        child.tell(signal_sent)
        finally:
            _end(running)
        if signals.interrupts or signals.terminations:
            code = 130 if signals.interrupts else 143
            saved = "every run saved" if all(child.saves for child in children) else "what was finished is kept"
            raise Interrupted(f"stopped, {saved}: give the same command again to continue", code)
    if stopped is not None:
        raise Interrupted(f"{stopped.name} was stopped and saved: give the same command to continue", stopped.code)
    if failures:
        raise several(failures)


def others_go_on(child: Child, failure: UserError, failures: list[UserError]) -> bool:
    """Append the failure to `failures`, and return whether the other runs may continue."""
    failures.append(failure)
    child.has_failed = child.is_alone and len(failures) < FAILURES
    return child.has_failed


def several(failures: Sequence[UserError]) -> UserError:
    """Return the first failure, with the number of further ones in its message."""
    more = f" ({len(failures) - 1} more failed)" * (len(failures) > 1)
    return UserError(f"{failures[0]}{more}")


def _gpus() -> list[str]:
    """Return the GPUs to distribute the runs over; none if the machine has fewer than two."""
    row = accelerator()
    count = 0 if row is None else len(row.devices())
    if row is None or count < 2:
        return []
    visible = os.environ.get(row.visible)
    return [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]


def _end(running: list[Child]) -> None:
    """End the children that are still running, which happens only after a second Ctrl-C or a bug."""
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
