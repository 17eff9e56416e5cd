"""What changed since an earlier step of a run: of its residual from snapshots, of its reads from a kept checkpoint."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from attnres.errors import UserError
from attnres.inspect.attribution import by_size
from attnres.inspect.inspection import Inspection
from attnres.inspect.routing import By, Routing
from attnres.inspect.steps import StepChange, between
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.terminal import grid, say
from attnres.text import number, short
from attnres.training.checkpoint import kept

EDGES = 10
"""Of which the change is listed."""


def change_since(checkpoint: Checkpoint, step: int) -> StepChange:
    """What the residual of a run's model learned since that step.

    Raises:
        UserError: no run, or no snapshot of that step.
    """
    if checkpoint.run is None or checkpoint.step is None:
        raise UserError(f"--since looks at an earlier step of a run's training: {checkpoint.name} is no run's folder")
    return between(checkpoint, step, checkpoint.step)


def since_table(
    change: StepChange,
    checkpoint: Checkpoint,
    now: Inspection,
    load: Callable[[Checkpoint], Any],
    inspected: Callable[[Any, str], Inspection],
    by: By,
    console: Console,
) -> dict[str, Any]:
    """Tables and record of what changed.

    Args:
        now: what the model makes of the text.
        load: the model of a checkpoint, as that one was loaded.
        inspected: what another model makes of the text, with its name.
    """
    console.print()
    record = change.to_dict()
    if any(value is not None for value in change.after):
        table = grid("read", right=("cosine of its query", f"sharpness at {change.first:,}", f"at {change.last:,}"))
        for row in zip(change.reads, change.turned, change.before, change.after, strict=True):
            table.add_row(row[0], *map(short, row[1:]))
        console.print(table)
    for name, largest in change.tables.items():
        say(console, f"{name}: a number changed by {number(largest)} at most")
    assert checkpoint.run is not None
    folder = kept(checkpoint.run, change.first)
    if not folder.is_dir():
        say(console, not_kept(change.first))
        return record
    then = inspected(
        load(open_checkpoint(folder, trust_remote_code=checkpoint.trusted)),
        f"{checkpoint.title()} at step {change.first:,}",
    )
    losses = [number(one.losses["mean"]) for one in (then, now)]
    say(console, f"\nloss {losses[0]} at step {change.first:,}, {losses[1]} at {change.last:,}")
    earlier, later = Routing.of(then, by), Routing.of(now, by)
    if earlier is None or later is None:
        return record
    rows = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(earlier.values, later.values, strict=True)]
    names = [read.name for read in later.layout], [[one.name for one in read.sources] for read in later.layout]
    edges = by_size(*names, rows)
    table = grid("edge", right=(f"{later.by} at {change.first:,}", f"at {change.last:,}", "change"))
    before = {edge[:2]: edge[2] for edge in by_size(*names, earlier.values)}
    for read, source, moved in edges[:EDGES]:
        value = before[read, source]
        table.add_row(f"{read} ← {source}", short(value), short(value + moved), short(moved, signed=True))
    console.print(table)
    return record | {later.by: [{"read": r, "source": s, "change": value} for r, s, value in edges]}


def not_kept(step: int) -> str:
    """What is said where a step's residual was kept and nothing else."""
    return (
        f"what reads were made of at step {step:,} needs all weights of that step, and only the residual's were kept: "
        f"train with --keep-at {step}"
    )
