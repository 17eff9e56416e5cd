"""Measure the loss of each held-out window."""

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attnres.errors import UserError, foreign
from attnres.files import by_step, refuse_special, write_bytes
from attnres.head import evaluating
from attnres.training.objective import Cast, held_out_losses
from attnres.training.parallel import Processes
from attnres.training.records import ADVICE

EARLY, LATE, AROUND = 50, 250, 5
"""Positions in a window of 256 tokens whose losses the in-context score compares, and the number of neighbours averaged
on either side."""
AT_THE_END = 4
"""Factor of the number of windows after the last step, relative to the other validations."""


@torch.no_grad()
def window_losses(
    model: nn.Module, windows: Tensor, who: Processes, cast: Cast, batch: int, kind: str = "whole"
) -> np.ndarray:
    """Return the mean loss and in-context score of each held-out window: (count, T + 1) int64 -> (count, 2) float64,
    nats a token.

    The in-context score is the loss late in the window minus the loss early in it (`token_weights`): the better a model
    uses its context, the lower it is. The windows are divided among the processes, `batch` at a time, and all get the
    complete result. `kind` is how losses are computed, see `loss_kind`.
    """

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return held_out_losses(model, x, y, cast, kind)

    return shared_out(losses, lambda weights: weights, model, windows, who, batch, (who.rank, who.world_size))


@torch.no_grad()
def shared_out(
    of_tokens: Callable[[Tensor, Tensor], Tensor],
    tokens_here: Callable[[Tensor], Tensor],
    model: nn.Module,
    windows: Tensor,
    who: Processes,
    batch: int,
    place: tuple[int, int],
    *,
    filled: bool = False,
) -> np.ndarray:
    """Compute `window_losses` with `of_tokens` as the pass through `model`: x, y (B, T) int64 -> losses (B, T), or the
    losses of this process's tokens.

    Args:
        tokens_here: returns the part of (B, T) whose losses `of_tokens` computes.
        place: (index, number of parts) of this process's windows.
        filled: whether every pass has `batch` windows, as a pipeline's must.

    All processes make equally many passes, because a pass of a sharded model involves all of them. Window 0 is what a
    process without windows left passes, and what fills a batch.
    """
    rank, shares = place
    losses = torch.zeros(len(windows), 2, dtype=torch.float64, device=who.device)
    weights = tokens_here(token_weights(windows.shape[1] - 1).to(who.device))
    share = torch.arange(len(windows))[rank::shares]
    with evaluating(model):
        for start in range(0, math.ceil(len(windows) / shares), batch):
            part = share[start : start + batch]
            missing = batch - len(part) if filled else int(not len(part))
            tokens = windows[nn.functional.pad(part, (0, missing))].to(who.device)
            values = (of_tokens(tokens[:, :-1], tokens[:, 1:]).double()[:, None] * weights).sum(-1)
            losses[part.to(who.device)] = values[: len(part)]
    return who.sum(losses).cpu().numpy()


def token_weights(length: int) -> Tensor:
    """Return the weight of each token of a window in its mean loss and in its in-context score: (2, length) float64."""
    weights = torch.zeros(2, length, dtype=torch.float64)
    weights[0] = 1 / length
    reach = AROUND * length // 256
    for place, sign in ((EARLY, -1), (LATE, 1)):
        middle = place * length // 256
        around = weights[1, max(0, middle - reach) : middle + reach + 1]
        around += sign / len(around)
    return weights


def save_windows(folder: str | Path, step: int | None, losses: np.ndarray) -> None:
    """Write losses to RUN/val/STEP.npy, or without a step to RUN/val/final.npy, whole or not at all."""
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
    return by_step(Path(folder) / "val", "npy")


def windows_path(folder: str | Path, step: int | None) -> Path:
    """Return RUN/val/STEP.npy, the step in six digits or more; without a step RUN/val/final.npy."""
    return Path(folder) / "val" / ("final.npy" if step is None else f"{step:06d}.npy")


def last_three(folder: str | Path) -> float:
    """Return the mean of the held-out losses of the last three validations, or of as many as there are: it varies less
    over seeds than the last one."""
    files = windows_files(folder)
    return float(np.mean([read_windows(files[step]).mean() for step in sorted(files)[-3:]]))
