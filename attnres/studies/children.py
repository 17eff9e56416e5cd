"""Training runs in processes of their own: started, watched, stopped together.

Each run has a process to itself so that its peak memory is its own.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

import attnres
from attnres.errors import ERROR_FILE, Interrupted, UserError
from attnres.ops.cpu_build import SWITCH
from attnres.progress import STEPS, Bar, Bars
from attnres.residuals.registry import PLUGINS, plugins
from attnres.run_names import label_and_seed
from attnres.text import duration
from attnres.training.interrupt import PARENT, Signals, caught_signals
from attnres.training.metrics import growing
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
    """One run, and its process once it is started."""

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

    def variables(self) -> dict[str, str]:
        """Return what the environment of its process has besides, on whatever machine."""
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
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
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
        """Of its size, what it has not computed yet."""
        return self.size * (1 - self.latest()[0] / max(1, self.steps))

    @property
    def has_diverged(self) -> bool:
        """Whether it ended so where it may."""
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
        """The last training step in its metrics and the loss there; 0 and None before the first."""
        with contextlib.suppress(OSError):
            if lines := growing(self.folder / "metrics.jsonl", "train", tail=16384):
                return lines[-1]
        return 0, None

    def failure(self, how: str = "", log: Path | None = None) -> UserError:
        """Why it failed, in its own words where it had any, else `how` and where to look."""
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


class Ended(NamedTuple):
    """A run that took its time: its name, how much it computed, as a child has it, and the seconds it took."""

    name: str
    size: float
    seconds: float


@dataclass
class Pace:
    """What runs have taken, and how much is left, by their sizes; of runs that differ in their seed alone by those of
    them that have ended."""

    left: dict[str, float]
    """What is to be computed, by the name of a run that has not ended."""
    done: list[Ended] = field(default_factory=list)

    def ended(self, name: str, seconds: float) -> None:
        """Count a run that has ended."""
        self.done.append(Ended(name, self.left.pop(name), seconds))

    @property
    def seconds_left(self) -> float:
        """Of one run after the other; something has to be done."""
        groups = dict[str, list[Ended]]()
        for run in self.done:
            groups.setdefault(_without_seed(run.name), []).append(run)
        return math.fsum(size * _rate(groups.get(_without_seed(name), self.done)) for name, size in self.left.items())


def _without_seed(name: str) -> str:
    taken = label_and_seed(name)
    return taken[0] if taken else name


def _rate(runs: Sequence[Ended]) -> float:
    """Seconds for a unit of size; 0 where all steps had been made before."""
    size = math.fsum(run.size for run in runs)
    return math.fsum(run.seconds for run in runs) / size if size else 0.0


@dataclass
class Watch:
    """What the user sees of children: a line before each with the time left in all, bars of several at once, and how
    the runs stand."""

    bars: Bars
    pace: Pace
    jobs: int
    number: int  # of the last one that began
    total: int
    standing: Callable[[], Table | None]
    on_end: Callable[[Child], None]
    shown: dict[Path, Bar] = field(default_factory=dict)

    def start(self, child: Child) -> None:
        """One begins."""
        self.number += 1
        when = f", about {duration(self.pace.seconds_left / self.jobs)} left in all" if self.pace.done else ""
        self._print(f"run {self.number}/{self.total} {child.name}{when}", style="bold")
        self.shown[child.folder] = self.bars.add(child.name, child.steps, child.latest()[0])

    def end(self, child: Child) -> None:
        """One has ended."""
        wall = time.monotonic() - child.began
        self.shown.pop(child.folder).remove()
        if child.has_failed:
            self.pace.left.pop(child.name)
            return self._print(f"{child.name} failed in {duration(wall)}: the others go on")
        self.pace.ended(child.name, wall)
        if self.jobs > 1:
            self._print(f"{child.name} {'diverged' if child.has_diverged else 'finished'} in {duration(wall)}")
        self.on_end(child)
        if self.pace.left and self.bars.progress.disable and (table := self.standing()) is not None:
            self._print(table)

    def poll(self, running: list[Child]) -> None:
        """Time goes by."""
        for child in running:
            step, loss = child.latest()
            if loss is not None:
                self.shown[child.folder].update(step, f"loss {loss:.3f}")

    def _print(self, what: str | Table, style: str | None = None) -> None:
        self.bars.console.print(what, style=style, highlight=False)


def train_all(
    children: list[Child],
    done: Sequence[Ended],
    *,
    jobs: int,
    say: Console,
    run: "Runner | None" = None,
    until: float = math.inf,
    standing: Callable[[], Table | None] = lambda: None,
    on_end: Callable[[Child], None] = lambda child: None,
) -> None:
    """Run all of them, one line before each with the time left in all; of several at once there are bars.

    Args:
        done: finished runs like these.
        run: what runs them; none is `run_children`.
        until: none begins after this moment (`time.monotonic`).
        standing: gives a table of how the runs stand: above the bars, or printed whenever one has ended.
        on_end: called with one that has ended.

    Raises:
        UserError, Interrupted: as `run_children`.
    """
    pace = Pace({child.name: child.left for child in children}, list(done))
    total = len(done) + len(children)
    if done:
        say.print(f"{len(done)} of {total} runs are finished already", highlight=False)
    if not children:
        return
    with Bars(STEPS, shown=jobs > 1, stays=False, above=standing, console=say) as bars:
        watch = Watch(bars, pace, jobs, len(done), total, standing, on_end)
        (run or run_children)(
            children,
            jobs=jobs,
            on_start=watch.start,
            on_end=watch.end,
            on_poll=watch.poll,
            log_of=lambda child: child.folder.parent / "logs" / f"{child.folder.name}.log" if jobs > 1 else None,
            until=until,
        )


class Runner(Protocol):
    """What runs children: in processes here, or as jobs of a cluster."""

    def __call__(
        self,
        children: list[Child],
        *,
        jobs: int,
        on_start: Callable[[Child], None],
        on_end: Callable[[Child], None],
        on_poll: Callable[[list[Child]], None],
        log_of: Callable[[Child], Path | None],
        until: float,
    ) -> None: ...


def run_children(
    children: list[Child],
    *,
    jobs: int,
    on_start: Callable[[Child], None],
    on_end: Callable[[Child], None],
    on_poll: Callable[[list[Child]], None],
    log_of: Callable[[Child], Path | None],
    until: float = math.inf,
) -> None:
    """Run all of them, `jobs` at once; none begins after the moment `until`. On several GPUs each has one to itself.

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
                    on_start(child)
                    taken = [on[other.folder] for other in running]
                    on[child.folder] = None if child.names_gpu else min(gpus, key=taken.count, default=None)
                    child.start(log=log_of(child), gpu=on[child.folder])
                    running.append(child)
                time.sleep(POLL_S)
                on_poll(running)
                for child in [child for child in running if not child.running]:
                    running.remove(child)
                    if child.code == 0 or child.has_diverged:
                        on_end(child)
                    elif signal_sent or ended:
                        continue
                    elif child.code in STOPPED:
                        ended, stopped = True, child
                    elif others_go_on(child, child.failure(), failures):
                        on_end(child)
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
    """The first of them, which says how many more there are."""
    more = f" ({len(failures) - 1} more failed)" * (len(failures) > 1)
    return UserError(f"{failures[0]}{more}")


def _gpus() -> list[str]:
    """The GPUs that runs may have, where there are several."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]
    return names if count > 1 else []


def _wanted(signals: Signals, ended: bool) -> int:
    """The signal to pass on to the running children, 0 for none."""
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
