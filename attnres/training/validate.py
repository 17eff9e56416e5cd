"""The loss, window by window on held-out text."""

import io
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attnres.errors import UserError, foreign
from attnres.files import refuse_special, write_bytes
from attnres.head import evaluating
from attnres.training.objective import Cast, held_out_losses
from attnres.training.parallel import Processes
from attnres.training.records import ADVICE


@torch.no_grad()
def window_losses(
    model: nn.Module, windows: Tensor, who: Processes, cast: Cast, batch: int, kind: str = "whole"
) -> np.ndarray:
    """Mean loss of each held-out window: (count, T + 1) int64 -> (count,) float64 in nats a token.

    The processes share the windows out, `batch` at a time, and all get the whole result. `kind` is how losses are made,
    see `loss_kind`.
    """

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return held_out_losses(model, x, y, cast, kind)

    return shared_out(losses, model, windows, who, batch, (who.rank, who.world_size))


@torch.no_grad()
def shared_out(
    of_tokens: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    windows: Tensor,
    who: Processes,
    batch: int,
    place: tuple[int, int],
) -> np.ndarray:
    """Return the same with `of_tokens`, which passes through `model`: x, y (B, T) int64 -> losses (B, T), or those of
    some of the tokens, where other processes give the others.

    Args:
        place: which of how many shares of the windows is this process's.

    All processes make as many passes, because one of a model in shares is a pass of all: who has no window left makes
    one of the first again.
    """
    rank, shares = place
    losses = torch.zeros(len(windows), dtype=torch.float64, device=who.device)
    share = torch.arange(len(windows))[rank::shares]
    with evaluating(model):
        for start in range(0, math.ceil(len(windows) / shares), batch):
            part = share[start : start + batch]
            tokens = windows[part if len(part) else [0]].to(who.device)
            sums = of_tokens(tokens[:, :-1], tokens[:, 1:]).double().sum(1)
            losses[part.to(who.device)] = sums[: len(part)] / (tokens.shape[1] - 1)
    return who.sum(losses).cpu().numpy()


def save_windows(folder: str | Path, step: int, losses: np.ndarray) -> None:
    """Write losses to RUN/val/STEP.npy, whole or not at all."""
    buffer = io.BytesIO()
    np.save(buffer, losses, allow_pickle=False)
    write_bytes(windows_path(folder, step), buffer.getvalue())


def read_windows(path: Path) -> np.ndarray:
    """Read the file of `save_windows`: (windows,) float64. Raises UserError."""
    refuse_special(path)
    with foreign(f"{path} is damaged", ADVICE):  # NumPy's header is a Python literal
        losses = np.load(path, allow_pickle=False)
    if not isinstance(losses, np.ndarray) or losses.ndim != 1 or not losses.size or losses.dtype.kind != "f":
        raise UserError(f"{path} should hold one loss for each held-out window: {ADVICE}")
    if not np.isfinite(losses).all():
        raise UserError(f"{path} holds losses that are not finite: {ADVICE}")
    return losses.astype(np.float64)


def windows_files(folder: str | Path) -> dict[int, Path]:
    """Return the files that `save_windows` wrote into RUN/val, by step."""
    files = sorted((Path(folder) / "val").glob("*.npy"))
    return {int(path.stem): path for path in files if re.fullmatch("[0-9]{1,18}", path.stem) and path.is_file()}


def windows_path(folder: str | Path, step: int) -> Path:
    """Return RUN/val/STEP.npy, the step in six digits or more."""
    return Path(folder) / "val" / f"{step:06d}.npy"
