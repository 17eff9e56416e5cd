"""A run that goes the way of another until some step need not go it again: it begins from that one's checkpoint.

With warm-up, a constant rate and a decay at the end (WSD), a run of T steps does what a longer one does until its
decay begins. So one long run with `keep_at`, and short decays that branch off it, give the losses of several budgets;
the result is that of whole runs, bit for bit.

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

SCHEDULE = ("steps", "optim.schedule", "optim.warmup", "optim.decay", "optim.min_lr_ratio")
"""Fields in which a branch may differ from its trunk, as far as they give the same rates until it branches off."""


def branch(trunk: Path, step: int, config: TrainConfig) -> None:
    """Make the folder of a run of `config` that has trained up to `step` as the run in `trunk` has; resume it then.

    Args:
        trunk: folder of a run that kept its checkpoint of that step (`keep_at`).
        config: of the branch, prepared (`attnres.training.prepare.prepare_run`).

    Raises:
        UserError: the trunk is no such run, or the branch's run would have gone another way until there.
    """
    if step >= config.steps:
        raise UserError(
            f"a run of {config.steps} steps cannot branch off at step {step}: its decay has no step of its own"
        )
    there = kept_checkpoint(trunk, step)
    _same_until(step, config, stored_state(there)["config"], trunk)
    with replaced_folder(config.out or ".") as folder:
        shutil.copytree(there, folder / "checkpoint")
        for name in ("data.json", "environment.json", "start.json", "metrics.jsonl"):
            if (trunk / name).is_file():
                shutil.copyfile(trunk / name, folder / name)
        Metrics(folder, step).close()  # without what the trunk measured after that
        for name in ("val", "residual"):
            if (trunk / name).is_dir():
                shutil.copytree(trunk / name, folder / name)
        reconfigure(folder, to_dict(config))  # resuming it forgets the trunk's held-out losses after `step`


def kept_checkpoint(trunk: Path, step: int) -> Path:
    """Return the folder of the checkpoint that a run kept of a step; raises UserError if it did not."""
    folder = kept(trunk, step)
    if not folder.is_dir():
        raise UserError(f"{trunk} kept no checkpoint of step {step}: train it with keep_at {step}, from the beginning")
    return folder


def branch_step(config: TrainConfig) -> int:
    """Return the last step before the decay of a run with the schedule wsd; raises UserError for another schedule."""
    optim = config.optim
    if optim.schedule != "wsd":
        raise UserError(f"optim.schedule is '{optim.schedule}': only runs with wsd branch off before their decay")
    return config.steps - min(round(optim.decay * config.steps), config.steps - round(optim.warmup * config.steps))


def _same_until(step: int, config: TrainConfig, trunk: dict[str, Any], where: Path) -> None:
    """Refuse a branch that would not have come to the trunk's state at `step`. Raises UserError."""
    changed = [name for name in differences(to_dict(config), trunk) if name not in SCHEDULE]
    if changed:
        raise UserError(f"a branch of {where} differs from it in {', '.join(changed)}: only the schedule may differ")
    if residual_class(config.model.residual).set_progress is not Residual.set_progress:
        raise UserError(
            f"residual '{config.model.residual}' is annealed over a run's steps, so that no other run begins as it "
            "does: train each budget from the start"
        )
    before = from_dict(trunk)
    for at in range(1, step + 1):
        if scheduled_rate(at, config.steps, config.optim) != scheduled_rate(at, before.steps, before.optim):
            raise UserError(
                f"a branch of {where} has another learning rate at step {at} of the {step} before it branches off: "
                "give both as many steps of warm-up, and let it branch off before any decay"
            )
