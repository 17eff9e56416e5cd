"""Run jobs on a Slurm cluster through submitit, whose local executor replaces the cluster in tests."""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnres.comparison.children import Child, Watch, others_go_on, several
from attnres.errors import Interrupted, UserError, require
from attnres.training.interrupt import caught_signals

POLL_S = 1.0
MOST = 64
"""Most jobs that wait or run at once."""


class Slurm:
    """Runs children as jobs, at most `MOST` at once.

    Args:
        settings: settings of submitit's executor under submitit's names, e.g. slurm_partition, timeout_min,
            gpus_per_node.
        cluster: None is Slurm if available; "local" runs jobs as processes on this machine.
        folder: folder for the jobs' logs, on a disk that all nodes share.

    Raises:
        UserError: submitit is not installed, or does not know a setting.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], cluster: str | None = "slurm") -> None:
        submitit = require("submitit", "--executor slurm needs submitit: pip install submitit")
        self._command = submitit.helpers.CommandFunction
        self._cores = settings.get("cpus_per_task", settings.get("slurm_cpus_per_task", 1))  # 1 is Slurm's default
        try:
            self.executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=cluster)
            self.executor.update_parameters(**{"name": "attnres", "timeout_min": 24 * 60, **settings})
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise UserError(f"Slurm cannot be used: {error}") from error

    def _job(self, child: Child) -> Any:
        """Return a function that runs the child's command with its variables; all others, with its GPU, are the
        job's."""
        there = dataclasses.replace(child, threads=self._cores)  # the node's cores, not this machine's
        words = [f"{name}={value}" for name, value in there.variables().items()]
        return self._command(["env", *words, *child.command(quiet=True)], verbose=False)

    def __call__(self, children: list[Child], watch: Watch, *, jobs: int, until: float = math.inf) -> None:
        """Submit all children and wait, as `run_children` of attnres.comparison does; the cluster replaces `jobs`.

        Raises:
            UserError: a run failed. The others were cancelled, which makes them save, unless the failed run has
                `is_alone`.
            Interrupted: Ctrl-C or SIGTERM; likewise.
        """
        waiting, running = list(children), list[tuple[Child, Any]]()
        failures, ended = list[UserError](), False
        with caught_signals() as signals:
            try:
                while (running or waiting) and not ended and not (signals.interrupts or signals.terminations):
                    if time.monotonic() > until:
                        waiting.clear()
                    while waiting and len(running) < MOST:
                        child = waiting.pop(0)
                        watch.start(child)
                        child.began = time.monotonic()
                        running.append((child, self.executor.submit(self._job(child))))
                    time.sleep(POLL_S)
                    watch.poll([child for child, _ in running])
                    for child, job in [pair for pair in running if pair[1].done()]:
                        running.remove((child, job))
                        ok = job.exception() is None or child.has_diverged
                        failure = None if ok else child.failure(f"failed as job {job.job_id}", job.paths.stderr)
                        if failure is None or others_go_on(child, failure, failures):
                            watch.end(child)
                        else:
                            ended = True
            finally:
                for _, job in running:
                    job.cancel()
            if signals.interrupts or signals.terminations:
                code = 130 if signals.interrupts else 143
                raise Interrupted("stopped, the jobs were cancelled: give the same command again to continue", code)
        if failures:
            raise several(failures)
