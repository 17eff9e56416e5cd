"""The models of a command line, and the steps of their training: where the residual alone was kept, what it learned."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attnres.app.explorer import Opened
from attnres.app.reading import Reading
from attnres.errors import UserError
from attnres.models.model_files import residual_at, snapshots
from attnres.models.open import Checkpoint
from attnres.residuals import Residual


class Learned(Opened):
    """The residual of `whole`, a run's model, at an earlier step, as the snapshot `path` has it."""

    def __init__(self, whole: Opened, step: int, path: Path) -> None:
        self._share(whole.checkpoint, whole.context)
        self.name, self.step, self.path, self.whole = whole.name, step, path, whole

    @cached_property
    def model(self) -> Any:
        """None. Raises UserError."""
        raise UserError(
            f"what {self.name} reads in a text at step {self.step:,} needs all weights of that step, and only the "
            f"residual's were kept: train with --keep-at {self.step}"
        )

    @property
    def label(self) -> str:
        return f"{self.name} (step {self.step:,}, residual alone)"

    def _content(self) -> bytes:
        return self.whole._content() + (self.path.read_bytes() if self.path.is_file() else b"")

    @cached_property
    def residual(self) -> Residual:
        """The residual. Raises UserError: a damaged snapshot."""
        return residual_at(self.checkpoint.config, self.path)

    @cached_property
    def sources(self) -> list[list[str]]:
        return [[source.name for source in read.sources] for read in self.layout]

    @cached_property
    def details(self) -> str:
        return f"{sum(one.numel() for one in self.residual.parameters()):,} parameters of the residual alone"

    def read(self, text: str) -> Reading:
        """Nothing. Raises UserError."""
        return self.model


def open_models(names: Sequence[str | Path], *, trust_remote_code: bool = False) -> list[Opened]:
    """The models of a command line, each after the steps of its run from the earliest on: checkpoints that it kept, and
    the residual alone at its other evaluations.

    Raises:
        UserError: no model there, or one whose reads mix no sources by weights.
    """
    named: dict[Opened, list[Opened]] = {}
    for name in names:
        model = Opened(name, trust_remote_code=trust_remote_code)
        model.sources  # noqa: B018  what cannot be shown is said at once
        run = model.checkpoint.run
        kept = sorted((run / "kept").glob("[0-9]*")) if run is not None else []
        named[model] = [Opened(folder) for folder in kept]
        whole = {one.step for one in (*named[model], model)}
        for step, path in snapshots(run).items() if run is not None else ():
            if step not in whole:
                named[model].append(Learned(model, step, path))
        named[model].sort(key=lambda one: one.step or 0)
    for (model, steps), title in zip(named.items(), _titles([model.checkpoint for model in named]), strict=True):
        for one in (*steps, model):
            one.name, one.whole = title, model
    return [one for model, steps in named.items() for one in (*steps, model)]


def find_demo(folder: Path) -> list[Path]:
    """The finished runs of `make demo` with depth reads: Block's and Full's.

    Raises:
        UserError: there is none.
    """
    runs = [run for label in ("block", "full") for run in sorted(folder.glob(f"{label}-seed*"))[:1]]
    finished = [run for run in runs if (run / "summary.json").is_file()]
    if not finished:
        raise UserError(
            f"no model was given, and the demo has left none in {folder}: run `make demo`, or give attnres app MODEL"
        )
    return finished


def _titles(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Their shortest titles that differ; of one that is there twice, short ones."""
    longest = max((len(one.folder.absolute().parts) for one in checkpoints), default=1)
    titles = [[one.title(parts) for one in checkpoints] for parts in range(1, longest + 1)]
    return next((row for row in titles if len(set(row)) == len(row)), titles[0])
