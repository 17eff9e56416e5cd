"""What do reads cost that chose a source early? A run goes on from the middle with its queries as at the start.

    attnres train --config RUN.yaml --keep-at 2000 --out runs/whole
    python experiments/reset.py runs/whole --step 2000 --out runs/reset --reads 1 3
    python experiments/reset.py runs/whole --step 2000 --out runs/cooled --residual-lr 0.0004

Everything else of the run is what it was at that step: weights, other reads, optimizers, batches to come. `attnres
report runs/whole runs/reset` compares the two."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import load_file, save_file

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.files import write_json
from attnres.training import train
from attnres.training.checkpoint import checksum, load_model, reconfigure, save_model, stored_state
from attnres.training.config import from_dict, to_dict
from attnres.training.finetune import base_parameters
from lab.branch import branch, kept_checkpoint

START = {"query": 0.0, "gain": 1.0}
MOMENTS = ("exp_avg", "exp_avg_sq")


def reset(model: Any, moments: dict[str, torch.Tensor], reads: Sequence[int] | None) -> None:
    """Set queries and gains of these reads (None: of all) to what they start from, their moments to zero.

    Raises:
        UserError: the model has no such reads.
    """
    rows = slice(None) if reads is None else list(reads)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    learned = {names[id(p)]: p for name, p in model.residual.named_parameters() if name.rpartition(".")[2] in START}
    if not learned:
        raise UserError(f"the residual '{model.config.residual}' has no queries to set back")
    for name, parameter in learned.items():
        if reads is not None and not all(0 <= read < len(parameter) for read in reads):
            raise UserError(f"--reads {' '.join(map(str, reads))}: the model has reads 0 to {len(parameter) - 1}")
        parameter.data[rows] = START[name.rpartition(".")[2]]
        for entry in MOMENTS:
            moments[f"{name}::{entry}"][rows] = 0.0


def main(
    run: tyro.conf.Positional[Path],
    *,
    step: int,
    out: Path,
    reads: tuple[int, ...] | None = None,
    residual_lr: float | None = None,
) -> None:
    """Go on with a run from a step with some of its queries and gains as at the start.

    Args:
        run: folder of a run that kept the checkpoint of that step (`--keep-at`).
        step: where it is left.
        out: folder of the run that goes on.
        reads: which; 0 is the first attention's, 1 the first MLP's, the last the output's. None is all.
        residual_lr: the rate of queries and gains from there on. None leaves it.
    """
    there = kept_checkpoint(run, step)
    state = stored_state(there)
    model, moments = load_model(there, state), load_file(there / "optimizer.safetensors")
    reset(model, moments, reads)
    config = dataclasses.replace(from_dict(state["config"]), out=str(out), name=out.name, resume=True, keep_at=())
    branch(run, step, config)
    if residual_lr is not None:
        config.optim.residual_lr = residual_lr
    save_model(model, out / "checkpoint" / "model")
    save_file(moments, out / "checkpoint" / "optimizer.safetensors")
    sums = {"model": checksum(base_parameters(model)), "optimizer": checksum(moments.items())}
    write_json(out / "checkpoint" / "state.json", {**state, "checksums": sums})
    reconfigure(out, to_dict(config))
    print(f"{out}: held-out loss {train(config)['val_loss']:.4f}")


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
