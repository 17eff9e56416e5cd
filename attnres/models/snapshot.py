"""Snapshots of a training run: what its residual had learned at each evaluation, RUN/residual/STEP.safetensors.

A residual's parameters and buffers, under their names in it, are small beside the model (a read has a query and a
gain), so that a run keeps all of them. They say how reads chose; what a read of a text is made of needs the rest of the
weights of that step too, a checkpoint (`keep_at`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from attnres.errors import UserError, foreign
from attnres.files import write_bytes
from attnres.paths import refuse_special
from attnres.residuals import Residual

LIGHT = 16 * 2**20
"""Bytes of a snapshot at most: a residual that has more to learn (a matrix a read) is left to checkpoints."""
_ADVICE = "remove it: the run and its other snapshots do not need it"


def tensors_of(residual: Residual) -> dict[str, Tensor]:
    """What a snapshot of a residual holds, by name; nothing where that is nothing or is not light."""
    tensors = residual.state_dict()
    return tensors if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) <= LIGHT else {}


def write_snapshot(run: str | Path, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a snapshot, whole or not at all. Raises UserError."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    write_bytes(Path(run) / "residual" / f"{step:06d}.safetensors", data)


def snapshots(run: str | Path) -> dict[int, Path]:
    """The snapshots of a run, by step, in order."""
    files = sorted((Path(run) / "residual").glob("*.safetensors"))
    return {int(path.stem): path for path in files if re.fullmatch("[0-9]{1,18}", path.stem) and path.is_file()}


def residual_at(config: Any, path: Path) -> Residual:
    """The residual of a model of this config, as a snapshot has it.

    Raises:
        UserError: it is damaged, or of another residual.
    """
    refuse_special(path)
    residual = config.make_residual()
    with foreign(f"{path} cannot be read", _ADVICE):
        tensors = load_file(path)
    if wrong := _misfit(residual.state_dict(), tensors):
        raise UserError(f"{path} is no snapshot of residual '{residual.name}' ({wrong}): {_ADVICE}")
    residual.load_state_dict(tensors)
    return residual.eval()


def _misfit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """What keeps tensors from being those of a residual; empty where nothing does."""
    if expected.keys() != tensors.keys():
        return f"it holds {', '.join(sorted(tensors)) or 'nothing'}, expected {', '.join(sorted(expected))}"
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            return f"{name} is {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        if not tensor.isfinite().all():
            return f"{name} has numbers that are not finite"
    return ""
