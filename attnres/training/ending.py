"""What a run leaves when its last step is done: what its model does inside, the model and the summary."""

import statistics
from typing import TYPE_CHECKING, Any

from torch import nn

from attnres.errors import UserError, foreign
from attnres.files import copy_files, replaced_folder, write_json
from attnres.stats import or_none, perplexity, standard_error
from attnres.terminal import say
from attnres.training import checkpoint, regimes, validate
from attnres.training.inside import write_inside

if TYPE_CHECKING:
    from attnres.training.run import Run


def finish(run: "Run") -> dict[str, Any]:
    """Write inspection.json, the model and, last, the summary, which is returned on every process.

    Raises:
        UserError: something cannot be written, on the first process; the others leave.
    """
    memory, model = run.peak_memory(), run.layout.gathered()
    return run.who.of_first(lambda: _write(run, model, memory))


def _write(run: "Run", model: Any, memory: int) -> dict[str, Any]:
    config, past, folder = run.config, run.past, run.output.folder
    run.output.sync()
    _write_inside(run, model)
    regimes.merge_adapter(model)
    with replaced_folder(folder / "model") as temporary:
        checkpoint.save_model(model, temporary)
        copy_files(run.files_beside(), temporary)
    losses = validate.read_windows(validate.windows_path(folder, past.step))
    seconds = statistics.median(past.times or [past.last_s])
    tokens = config.batch_size * config.data.seq_len
    summary = {
        "step": past.step,
        "tokens": past.step * tokens,
        "val_loss": past.val_loss,
        "val_se": or_none(standard_error(losses)),
        "perplexity": perplexity(float(losses.mean())),
        "train_loss": past.train_loss,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds,
        "flops_per_token": run.flops,
        "peak_flops": run.peak,
        "peak_memory_bytes": memory,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "extra_parameters": sum(parameter.numel() for parameter in model.residual.parameters()),
        "wall_s": past.wall_s,
        "windows": len(losses),
        "traits": model.residual("itself").traits._asdict(),
    }
    write_json(folder / "summary.json", summary)
    return summary


def _write_inside(run: "Run", model: nn.Module) -> None:
    """Write inspection.json, or say why there is none: a mechanism that trains may still say wrongly what its reads
    are made of, and the run is finished for all that."""
    mechanism = run.config.model
    try:
        with foreign(
            f"reads of '{mechanism.residual}' cannot be shown",
            f"attnres check {mechanism.residual_file or mechanism.residual} says why",
        ):
            write_inside(model, run.prepared, run.config, run.cast, run.rows())
    except UserError as error:
        say(run.bars.console, f"{run.config.name}: the run is finished without inspection.json: {error}")
