"""Training runs in processes of their own: started, watched, stopped together."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from attnres.errors import Interrupted, UserError
from attnres.studies.child import Child
from attnres.training.interrupt import Signals, caught_signals

POLL_S = 0.2
STOPPED = (130, 143)
"""Exit statuses of a run that was told to stop and saved."""
FAILURES = 3
"""Of runs that are alone: with so many the others end too."""
PATIENCE_S = 10.0
"""How long a child that was told to end may take when its parent fails, before it is killed."""


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
