"""One training run, from a configuration to a folder with its model, its metrics and its summary: the order of things.

What a step is: `attnres.training.step`. What is written: `attnres.training.run`.
"""

import dataclasses
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from attnres.errors import Interrupted
from attnres.files import locked
from attnres.training import environment, start
from attnres.training.check import check, fitted
from attnres.training.config import TrainConfig, resolve, to_dict
from attnres.training.ending import finish
from attnres.training.interrupt import caught_signals
from attnres.training.metrics import import_tracker
from attnres.training.output import folder_of
from attnres.training.parallel import Processes, join_processes, losses_said
from attnres.training.regimes import import_peft
from attnres.training.run import Run
from attnres.training.run_folder import claim


def train(config: TrainConfig, *, progress: bool = True) -> dict[str, Any]:
    """Carry out a run, or what is left of it, and return its summary (the content of summary.json).

    Raises:
        UserError: the configuration cannot run, the folder is taken, the loss diverged, a file cannot be written.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is saved, `code` is the exit status.
        SystemExit: the same, on all processes of torchrun but the first.
    """
    who = join_processes(config.device)
    with who.alike():
        config, notes = fitted(start.settle(resolve(config)), who.world_size)
        check(config, who.world_size)
        start.check_model(config)
        if config.track != "none" and who.first:
            import_tracker(config.track)
        if config.finetune.train_only == "lora":
            import_peft()
    for note in notes if who.first else []:
        print(f"attnres: {note}", file=sys.stderr)
    dtype = config.dtype if config.dtype != "auto" else ("bf16" if environment.has_bf16(who.device) else "fp32")
    config = dataclasses.replace(config, dtype=dtype, device=who.device.type)
    going_on = f"give the same command with --resume to go on from the last checkpoint in {config.out}"
    with losses_said(who, going_on), _claimed(config, who) as (finished, in_place):
        if finished is not None:
            return finished
        run = Run(config, who, progress=progress and who.first, in_place=in_place)
        with closing(run), run.arithmetic():
            with run.bars, caught_signals() as signals:
                run.begin()
                while run.past.step < config.steps:
                    run.step(signals)
                    run.measure()
                    done = run.past.step == config.steps
                    if (
                        run.past.step % config.save_every == 0
                        or run.past.step in config.keep_at
                        or run.steps.signalled
                        or run.output.gone
                        or done
                    ):
                        run.save()
                    if run.output.gone and not done:
                        raise who.same(run.taken_away())
                    if run.steps.signalled and not done:
                        stopped = Interrupted(
                            f"stopped at step {run.past.step} of {config.steps}, saved in "
                            f"{run.output.folder / 'checkpoint'}: give the same command with --resume to continue",
                            run.steps.signalled,
                        )
                        raise who.same(stopped)
            summary = finish(run)
            if run.output.gone:
                raise who.same(run.taken_away())
            return summary


@contextmanager
def _claimed(config: TrainConfig, who: Processes) -> Generator[tuple[dict[str, Any] | None, Callable[[], bool] | None]]:
    """The run's folder, kept from other runs meanwhile; gives the summary if the run is finished already, and to the
    first process a function that says whether the folder is still there."""
    with ExitStack() as stack:
        in_place: Callable[[], bool] | None = None

        def claimed() -> dict[str, Any] | None:
            nonlocal in_place
            finished = claim(folder_of(config), to_dict(config), resume=config.resume)
            if finished is None:
                in_place = stack.enter_context(locked(folder_of(config)))
                # And once more, should another process have been there.
                finished = claim(folder_of(config), to_dict(config), resume=config.resume)
            return finished

        summary = who.of_first(claimed)
        yield summary, in_place
