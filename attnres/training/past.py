"""What a run knows of its past besides tensors."""

from dataclasses import dataclass, field
from typing import Any

from attnres.typed import Count, Misfit, fit


@dataclass
class Past:
    """Where a run is and what it measured; saved with every checkpoint."""

    step: Count = 0
    wall_s: float = 0.0
    train_loss: float | None = None
    """Of the last training line."""
    val_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """Since the last training line."""
    times: list[float] = field(default_factory=list)
    """Seconds of the last steps, without validation, saving and the first steps."""
    last_s: float = 0.0
    """Seconds of the last step."""
    peak_memory_bytes: Count = 0
    """The most that any process took in any session up to the checkpoint."""


def past_of(state: dict[str, Any]) -> Past:
    """A checkpoint's `progress`; one that the run could not go on from raises ValueError."""
    try:
        past: Past = fit(state["progress"], Past)
    except Misfit as error:
        raise ValueError(error.sentence("progress")) from error
    if past.step != state["step"]:
        raise ValueError("its progress is not that of its step")
    return past
