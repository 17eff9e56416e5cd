"""Run training from a configuration to a folder with its model, its metrics and its summary.

`attnres.training.step` takes a step; `attnres.training.run` measures and writes after it.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from attnres.errors import Interrupted, UserError, foreign
from attnres.files import copy_files, locked, replaced_folder, write_json
from attnres.progress import say
from attnres.stats import or_none, perplexity, standard_error
from attnres.training import checkpoint, environment, finetune, validate
from attnres.training.config import TrainConfig, to_dict
from attnres.training.finetune import import_peft
from attnres.training.inspection import write_inspection
from attnres.training.interrupt import caught_signals
from attnres.training.parallel import Processes, join_processes, losses_said
from attnres.training.prepare import prepare_run
from attnres.training.records import import_tracker
from attnres.training.run import Run
from attnres.training.run_folder import claim


def stream_dtype(config: TrainConfig, dtype: Literal["fp32", "bf16"]) -> Literal["fp32", "bf16"]:
    """Return the residual stream's dtype, where matrix products are in `dtype`.

    Raises:
        UserError: it is narrower than the products.
    """
    if config.stream_dtype == "auto":
        return "bf16" if dtype == "bf16" and config.parallel.shard > 1 else "fp32"
    if config.stream_dtype == "bf16" and dtype != "bf16":
        raise UserError(
            f"stream_dtype is bf16 and dtype {dtype}: a stream in bf16 needs matrix products in bf16, give --dtype bf16"
        )
    return config.stream_dtype


def train(config: TrainConfig, *, progress: bool = True) -> dict[str, Any]:
    """Train a run, or the rest of it, and return its summary (the content of summary.json).

    >>> train(TrainConfig(steps=200, out="runs/mine"))["val_loss"]  # doctest: +SKIP
    4.51

    Raises:
        UserError: the configuration cannot run, another process uses the folder, the loss diverged, a file cannot be
            written.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is saved, `code` is the exit status.
        SystemExit: the same, on all processes of torchrun except the first.
    """
    who = join_processes(config.device)
    with who.alike():
        prepared = prepare_run(config, who.world_size)
        config = prepared.config
        if config.track != "none" and who.first:
            import_tracker(config.track)
        if config.finetune.train_only == "lora":
            import_peft()
    for note in prepared.notes if who.first else ():
        print(f"attnres: {note}", file=sys.stderr)
    dtype = config.dtype if config.dtype != "auto" else ("bf16" if environment.has_bf16(who.device) else "fp32")
    stream = stream_dtype(config, dtype)
    config = dataclasses.replace(config, dtype=dtype, stream_dtype=stream, device=who.device.type)
    prepared = dataclasses.replace(prepared, config=config)
    going_on = f"give the same command with --resume to go on from the last checkpoint in {config.out}"
    with (
        losses_said(who, going_on),
        _claimed(Path(config.out or "."), to_dict(config), who, resume=config.resume) as (finished, in_place),
    ):
        if finished is not None:
            return finished
        run = Run(prepared, who, progress=progress and who.first, in_place=in_place)
        with closing(run), run.arithmetic():
            with run.bars, caught_signals() as signals:
                run.begin()
                while run.run_state.step < config.steps:
                    run.step(signals)
                    run.measure()
                    done = run.run_state.step == config.steps
                    if (
                        run.run_state.step % config.save_every == 0
                        or run.run_state.step in config.keep_at
                        or run.steps.signalled
                        or run.output.gone
                        or done
                    ):
                        run.save()
                    if run.output.gone and not done:
                        raise who.same(run.taken_away())
                    if run.steps.signalled and not done:
                        stopped = Interrupted(
                            f"stopped at step {run.run_state.step} of {config.steps}, saved in "
                            f"{run.output.folder / 'checkpoint'}: give the same command with --resume to continue",
                            run.steps.signalled,
                        )
                        raise who.same(stopped)
            summary = finish(run)
            if run.output.gone:
                raise who.same(run.taken_away())
            return summary


@contextmanager
def _claimed(
    folder: Path, config: dict[str, Any], who: Processes, *, resume: bool
) -> Generator[tuple[dict[str, Any] | None, Callable[[], bool] | None]]:
    """Keep other runs out of the folder inside the block.

    Yields:
        The summary if the run is already finished, else None; and on the first process a function that returns whether
        the folder still exists.
    """
    with ExitStack() as stack:
        in_place: Callable[[], bool] | None = None

        def claimed() -> dict[str, Any] | None:
            nonlocal in_place
            finished = claim(folder, config, resume=resume)
            if finished is None:
                in_place = stack.enter_context(locked(folder))
                # Again, because another process may have trained here while this one waited for the lock.
                finished = claim(folder, config, resume=resume)
            return finished

        summary = who.of_first(claimed)
        yield summary, in_place


# ------------------------------------------------------------------ the end of a run


def finish(run: Run) -> dict[str, Any]:
    """Write inspection.json, the model and, last, the summary, which is returned on every process.

    Raises:
        UserError: a file cannot be written; raised on the first process, the others exit.
    """
    memory, final, model = run.peak_memory(), run.losses_at_end(), run.placed.gathered()
    return run.who.of_first(lambda: _write(run, model, memory, final))


def _write(run: Run, model: Any, memory: int, final: np.ndarray) -> dict[str, Any]:
    config, run_state, folder = run.config, run.run_state, run.output.folder
    run.output.sync()
    _write_inspection(run, model)
    finetune.merge_adapter(model)
    with replaced_folder(folder / "model") as temporary:
        checkpoint.save_model(model, temporary)
        copy_files(run.files_beside(), temporary)
    validate.save_windows(folder, None, final[:, 0])
    losses = validate.read_windows(validate.windows_path(folder, run_state.step))
    seconds = statistics.median(run_state.times or [run_state.last_s])
    tokens = config.batch_size * config.data.seq_len
    summary = {
        "step": run_state.step,
        "tokens": run_state.step * tokens,
        "val_loss": run_state.val_loss,
        "val_se": or_none(standard_error(losses)),
        "perplexity": perplexity(float(losses.mean())),
        "last_three": validate.last_three(folder),
        "final_loss": float(final[:, 0].mean()),
        "final_se": or_none(standard_error(final[:, 0])),
        "final_windows": len(final),
        "in_context": float(final[:, 1].mean()),
        "train_loss": run_state.train_loss,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds,
        "flops_per_token": run.flops,
        "peak_flops": run.peak,
        "peak_memory_bytes": memory,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "extra_parameters": sum(parameter.numel() for parameter in model.residual.parameters()),
        "wall_s": run_state.wall_s,
        "windows": len(losses),
        "traits": model.residual("itself").traits._asdict(),
    }
    write_json(folder / "summary.json", summary)
    return summary


def _write_inspection(run: Run, model: nn.Module) -> None:
    """Write inspection.json, or print why there is none: a mechanism that trains may still describe its reads wrongly,
    which must not fail a finished run."""
    mechanism = run.config.model
    try:
        with foreign(
            f"reads of '{mechanism.residual}' cannot be shown",
            f"attnres check {mechanism.residual_file or mechanism.residual} says why",
        ):
            write_inspection(
                run.output.folder,
                model,
                run.prepared,
                run.config.data,
                name=run.config.name,
                cast=run.cast,
                rows=run.layout.rows,
            )
    except UserError as error:
        say(run.bars.console, f"{run.config.name}: the run is finished without inspection.json: {error}")
