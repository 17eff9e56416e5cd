"""Runs in processes of their own, so that the peak memory of each is its own: started, watched, stopped together."""

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
from attnres.training.interrupt import PARENT, Signals, caught_signals
from attnres.training.records import growing
from attnres.training.run_folder import DIVERGED

POLL_S = 0.2
STOPPED = (130, 143)
"""Exit statuses of a run that was told to stop and saved."""
FAILURES = 3
"""Of runs that are alone: with so many the others end too."""
PATIENCE_S = 10.0
"""How long a child that was told to end may take when its parent fails, before it is killed."""


@dataclass
class Child:
    """A run, and its process once it is started."""

    name: str
    folder: Path
    config: Path
    steps: int
    size: float = 1.0  # how much it computes, in any unit, beside the others
    threads: int = 1
    kernels: bool | None = None  # whether C kernels read on a CPU; None leaves it to the environment
    process: subprocess.Popen | None = None
    log: Path | None = None
    began: float = 0.0
    names_gpu: bool = False  # its configuration does, so that it has to see all of them
    is_alone: bool = False  # where it diverges or fails the others go on
    saves: bool = True  # what it has when it is stopped
    has_failed: bool = False  # where it is alone
    first: int = 0  # the step it begins at, which others trained for it

    def variables(self) -> dict[str, str]:
        """Return the environment variables that its process has besides those of this one."""
        variables = {ERROR_FILE: str(self._error_file.resolve()), "OMP_NUM_THREADS": str(self.threads)}
        # The same package as this process's, wherever it was imported from.
        theirs = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # of which an empty one is the current folder
        variables["PYTHONPATH"] = os.pathsep.join([str(Path(attnres.__file__).parent.parent), *filter(None, theirs)])
        variables["PYTHONSAFEPATH"] = "1"  # `python -m` would import from the current folder first
        if self.threads == 1:  # others have the other cores: a run that was begun with more threads must not spin there
            variables["OMP_WAIT_POLICY"] = "passive"
        if self.kernels is not None:
            variables[SWITCH] = "1" if self.kernels else "0"
        variables[PLUGINS] = plugins()  # a configuration names a file and runs none
        return variables

    def start(self, *, log: Path | None, gpu: str | None = None) -> None:
        """Start it, its output in `log` (None: shown as it comes), seeing one GPU alone if one is named. Raises
        UserError."""
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
        """Return the words of the command that does the run; `quiet` for one whose output nobody watches."""
        command = [sys.executable, "-m", "attnres", "train", "--config", str(self.config), "--resume"]
        return [*command, "--no-progress"] if quiet else command

    @property
    def left(self) -> float:
        """Return how much of its `size` is still to be computed."""
        done = max(0, self.latest()[0] - self.first) / max(1, self.steps - self.first)
        return self.size * max(0.0, 1 - done)

    @property
    def has_diverged(self) -> bool:
        """Return whether it diverged and is a run whose divergence stops no other."""
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
        """Return why it failed, in its own words where it had any, else `how` and where to look."""
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
        again = "continues from its last checkpoint" if self.saves else "tries again"
        return UserError(f"{self.name} {how}, {where}; the same command {again}")

    @property
    def _error_file(self) -> Path:
        return self.config.with_suffix(".error")


class Watch:
    """Listens to runs while they go on. This one does nothing, and lets their output be shown."""

    def start(self, child: Child) -> None:
        """One begins."""

    def end(self, child: Child) -> None:
        """One has ended, or failed where it is alone."""

    def poll(self, running: list[Child]) -> None:
        """Time goes by: several times a second."""

    def log_of(self, child: Child) -> Path | None:
        """Return the file for the output of one; None shows it as it comes."""
        return None


class Runner(Protocol):
    """What runs children: in processes here, or as jobs of a cluster."""

    def __call__(self, children: list[Child], watch: Watch, *, jobs: int, until: float = math.inf) -> None: ...


def run_children(children: list[Child], watch: Watch, *, jobs: int, until: float = math.inf) -> None:
    """Run all children, `jobs` at once; none begins after the moment `until`. On several GPUs each child has one.

    Raises:
        UserError: one failed or could not be started; the others were told to save and stop, but where it is alone,
            up to `FAILURES`.
        Interrupted: Ctrl-C or SIGTERM; the running ones saved and stopped.
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
                    taken = [on[other.folder] for other in running]
                    on[child.folder] = None if child.names_gpu else min(gpus, key=taken.count, default=None)
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
                if not signal_sent and (signal_due := _wanted(signals, ended)):
                    signal_sent = signal_due
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
    """Add to `failures` that this run failed; whether it is alone and few enough have."""
    failures.append(failure)
    child.has_failed = child.is_alone and len(failures) < FAILURES
    return child.has_failed


def several(failures: Sequence[UserError]) -> UserError:
    """Return the first failure, which says how many more there are."""
    more = f" ({len(failures) - 1} more failed)" * (len(failures) > 1)
    return UserError(f"{failures[0]}{more}")


def _gpus() -> list[str]:
    """Return the GPUs that runs may have, where there are several."""
    row = accelerator()
    count = 0 if row is None else len(row.devices())
    if row is None or count < 2:
        return []
    visible = os.environ.get(row.visible)
    return [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]


def _wanted(signals: Signals, ended: bool) -> int:
    """Return the signal to pass on to the running children, 0 for none."""
    if signals.terminations:
        return signal.SIGTERM
    return signal.SIGINT if signals.interrupts or ended else 0


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
