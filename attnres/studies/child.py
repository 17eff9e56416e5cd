"""A training run as a process of its own, so that its peak memory is its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import attnres
from attnres.errors import ERROR_FILE, UserError
from attnres.ops.cpu_build import SWITCH
from attnres.residuals.registry import PLUGINS, plugins
from attnres.training.interrupt import PARENT
from attnres.training.metrics import growing
from attnres.training.run_folder import DIVERGED


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
    first: int = 0  # the step it begins at, which others trained for it

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
        done = max(0, self.latest()[0] - self.first) / max(1, self.steps - self.first)
        return self.size * max(0.0, 1 - done)

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
