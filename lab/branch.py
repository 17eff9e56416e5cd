"""Start a run from the checkpoint of another run that trains identically up to that step.

With warm-up, a constant learning rate and a decay at the end (WSD), a run of T steps is identical to a longer one until
its decay begins. So one long run with `keep_at`, and short decays that branch off it, give the losses of several
budgets; the results equal those of separate runs, bit for bit.

Source: Hägele et al., arXiv 2405.18392; OLMo-core's ladder ("WSD-S").
"""

import shutil
from pathlib import Path
from typing import Any

from attnres.errors import UserError
from attnres.files import replaced_folder
from attnres.residuals import Residual, residual_class
from attnres.training.checkpoint import kept, reconfigure, stored_state
from attnres.training.config import TrainConfig, differences, from_dict, to_dict
from attnres.training.optim import scheduled_rate
from attnres.training.records import Metrics
from lab.store import attnres_version, run_key

SCHEDULE = ("schedule", "warmup", "decay", "min_lr_ratio")
"""Fields of `optim` in which a branch may differ from its trunk, besides `steps`, as long as the learning rates are
equal until it branches off."""


def branch(trunk: Path, step: int, config: TrainConfig) -> None:
    """Write the folder of a run of `config` with the state of the run in `trunk` at `step`; `--resume` continues it.

    Args:
        trunk: folder of a run that kept its checkpoint of that step (`keep_at`).
        config: configuration of the branch, prepared (`attnres.training.prepare.prepare_run`).

    Raises:
        UserError: the trunk is no such run, or the branch's run would differ from it before `step`.
    """
    if step >= config.steps:
        raise UserError(
            f"a run of {config.steps} steps cannot branch off at step {step}: no step would be left for its decay"
        )
    there = kept_checkpoint(trunk, step)
    _refuse_other_run(step, config, stored_state(there)["config"], trunk)
    with replaced_folder(config.out or ".") as folder:
        shutil.copytree(there, folder / "checkpoint")
        for name in ("data.json", "environment.json", "start.json", "metrics.jsonl"):
            if (trunk / name).is_file():
                shutil.copyfile(trunk / name, folder / name)
        Metrics(folder, step).close()  # drop the trunk's later measurements
        for name in ("val", "residual"):
            if (trunk / name).is_dir():
                shutil.copytree(trunk / name, folder / name)
        reconfigure(folder, to_dict(config))  # resuming drops the trunk's held-out losses after `step`


def kept_checkpoint(trunk: Path, step: int) -> Path:
    """Return the folder of a run's kept checkpoint at a step; raises UserError if there is none."""
    folder = kept(trunk, step)
    if not folder.is_dir():
        raise UserError(f"{trunk} kept no checkpoint of step {step}: train it with keep_at {step}, from the beginning")
    return folder


def _refuse_other_run(step: int, config: TrainConfig, trunk: dict[str, Any], where: Path) -> None:
    """Refuse a branch that would not have reached the trunk's state at `step`. Raises UserError.

    With the branch's schedule the trunk must be the same run (`lab.store.run_key`), and the learning rates must be
    equal until `step`.
    """
    fields = to_dict(config)
    optim = {**trunk["optim"], **{name: fields["optim"][name] for name in SCHEDULE}}
    rescheduled = {**trunk, "steps": config.steps, "optim": optim}
    version = attnres_version(where)
    if run_key(rescheduled, version) != run_key(fields):
        names = differences(fields, rescheduled) or [f"the version of attnres, {version}"]
        raise UserError(f"a branch of {where} differs from it in {', '.join(names)}: only the schedule may differ")
    if residual_class(config.model.residual).set_progress is not Residual.set_progress:
        raise UserError(
            f"residual '{config.model.residual}' is annealed over a run's steps, so runs of other lengths differ "
            "from the first step: train each budget from the start"
        )
    before = from_dict(trunk)
    for at in range(1, step + 1):
        if scheduled_rate(at, config.steps, config.optim) != scheduled_rate(at, before.steps, before.optim):
            raise UserError(
                f"a branch of {where} has another learning rate at step {at} of the {step} before it branches off: "
                "give both as many steps of warm-up, and let it branch off before any decay"
            )
