"""Activation patching between two prompts: which edges carry what makes the difference.

result = patch(model, "The cats", "The cat", target=" are", against=" is")
result.restored  # by read and source: 0 as on the corrupted prompt, 1 as on the clean one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.forward import evaluating
from attnres.inspect import notebook
from attnres.inspect.attribution import TOP, as_rows, by_size, last_log_probs
from attnres.inspect.edits import Patch
from attnres.inspect.effects import Text, Token, prompt_ids, token_id
from attnres.inspect.intervene import intervene
from attnres.inspect.record import find_residual
from attnres.inspect.routing import Named
from attnres.inspect.vectors import read_vectors
from attnres.models.replay import Replay
from attnres.residuals import Read


@dataclass(frozen=True, repr=False)
class Patching(Named):
    """What the corrupted prompt's prediction becomes when one edge's vector is the clean prompt's.

    Attributes:
        target, against: the token ids whose m = ln p(target) - ln p(against) after the prompt is measured; without
            `against` m = ln p(target).
        clean, corrupted: m of the two prompts.
        layout: the reads and their sources; reads, sources: their names.
        patched: m with each edge patched, rows parallel to `sources`.
    """

    target: int
    against: int | None
    clean: float
    corrupted: float
    layout: Sequence[Read]
    patched: list[list[float]]

    @property
    def restored(self) -> list[list[float]]:
        """(m - m_corrupted) / (m_clean - m_corrupted) of each edge: 0 changes nothing, 1 restores the clean
        prompt's."""
        gap = self.clean - self.corrupted
        return [[(value - self.corrupted) / gap for value in row] for row in self.patched]

    def top(self, k: int = TOP) -> list[tuple[str, str, float]]:
        """The k (read, source, restored) that change most."""
        return by_size(self.reads, self.sources, self.restored)[:k]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {name: value for name, value in vars(self).items() if name != "layout"}
        return values | {"reads": self.reads, "sources": self.sources, "restored": self.restored}

    def __repr__(self) -> str:
        return f"Patching(clean {self.clean:.3f}, corrupted {self.corrupted:.3f}, {sum(map(len, self.patched))} edges)"

    def frame(self) -> Any:
        """A data frame with a row an edge: read, source, patched, restored."""
        return notebook.edges_frame(self.reads, self.sources, patched=self.patched, restored=self.restored)

    def _repr_html_(self) -> str:
        title = f"{self!r}: restored with the clean prompt's vector, 0 nothing, 1 all"
        return notebook.heat(title, self.layout, self.restored)


def patch(
    model: nn.Module,
    clean: Text,
    corrupted: Text,
    *,
    target: Token | None = None,
    against: Token | None = None,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> Patching:
    """Patch every (read, source) edge of the corrupted prompt with the clean prompt's vector, one at a time, at all
    tokens.

    The weights of the read stay the corrupted prompt's (`Patch`), other reads of the source see it unpatched.

    Args:
        clean, corrupted: prompts of as many tokens.
        target: the token whose ln p is measured; None is the clean prompt's likeliest.
        against: measure ln p(target) - ln p(against), the difference of logits.
        batch_size: copies in one forward pass. progress: called with the number of edges after each pass.

    Raises:
        UserError: prompts of different lengths, or with the same prediction; tokens that are not there; as `predict`.
    """
    ids, other = prompt_ids(model, clean), prompt_ids(model, corrupted)
    if ids.shape != other.shape:
        raise UserError(
            f"the clean prompt has {ids.shape[1]} tokens and the corrupted one {other.shape[1]}: give two of as many"
        )
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: expected at least 1")
    vectors = read_vectors(model, ids)
    target_id = int(vectors.log_probs.argmax()) if target is None else token_id(model, target)
    rival = None if against is None else token_id(model, against)

    def measure(log_probs: Tensor) -> Tensor:
        return log_probs[:, target_id] - (0.0 if rival is None else log_probs[:, rival])

    edges = [(i, s) for i, read in enumerate(vectors.layout) for s, one in enumerate(read.sources)]
    patched: list[float] = []
    with evaluating(model), torch.no_grad():
        before, after = (measure(last_log_probs(model, one)).item() for one in (ids, other))
        if abs(before - after) < 1e-6:
            raise UserError("both prompts give the same prediction: there is nothing to restore")
        replay = Replay(model, find_residual(model), lambda: last_log_probs(model, other))
        for start in range(0, len(edges), batch_size):
            part = edges[start : start + batch_size]
            shape = (len(part), other.shape[1])
            edits = []
            for row, (index, place) in enumerate(part):
                mask = torch.zeros(shape, dtype=torch.bool)
                mask[row] = True
                read = vectors.layout[index]
                if read.sources[place].kind != "null":  # zeros are not mixed
                    vector = vectors.sources[index][place]
                    edits.append(Patch(read.sources[place].name, vector, reads=index, tokens=mask))
            with replay.begun(part[0][0], len(part)), intervene(model, *edits):
                patched += measure(last_log_probs(model, other.expand(shape))).tolist()
            if progress is not None:
                progress(len(part))
    rows = as_rows(patched, [read.sources for read in vectors.layout])
    return Patching(target_id, rival, before, after, vectors.layout, rows)
