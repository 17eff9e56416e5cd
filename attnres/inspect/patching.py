"""Patching: what a prompt predicts when one edge's vectors come from another prompt, whose tokens are aligned."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch

from attnres.errors import UserError
from attnres.head import evaluating
from attnres.inspect import notebook
from attnres.inspect.attribution import TOP, Change, as_rows, by_size, each_alone, margin
from attnres.inspect.edits import Edit, Patch, intervene, position_of
from attnres.inspect.effects import read_vectors
from attnres.inspect.subject import Model, Text, Token, as_model, last_log_probs, prompt_ids, token_id
from attnres.residuals import Read


@dataclass(frozen=True, repr=False)
class Patching(notebook.Named, notebook.Result):
    """What the corrupted prompt's prediction becomes when one edge's vector is the clean prompt's.

    Attributes:
        target, against: the token ids whose m = ln p(target) - ln p(against) after the prompt is measured; without
            `against` m = ln p(target).
        clean, corrupted: m of the two prompts.
        layout: the reads and their sources; reads, sources: their names.
        patched: m with each edge patched, rows parallel to `sources`.
        position: m is measured after this token of the corrupted prompt.
        aligned: for each token of the corrupted prompt up to `position` the number of the clean one's whose vectors it
            is given; None for a token that has none and is not patched.

    The data frame has a row an edge: read, source, patched, restored.
    """

    target: int
    against: int | None
    clean: float
    corrupted: float
    layout: Sequence[Read]
    patched: list[list[float]]
    position: int
    aligned: list[int | None]

    @property
    def restored(self) -> list[list[float]]:
        """(m - m_corrupted) / (m_clean - m_corrupted) of each edge: 0 changes nothing, 1 restores the clean
        prompt's."""
        gap = self.clean - self.corrupted
        return [[(value - self.corrupted) / gap for value in row] for row in self.patched]

    def top(self, k: int = TOP) -> list[tuple[str, str, float]]:
        """Return the k (read, source, restored) that change most."""
        return [(read.name, source.name, value) for read, source, value in by_size(self.layout, self.restored)[:k]]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"restored": self.restored}

    def _about(self) -> str:
        return f"clean {self.clean:.3f}, corrupted {self.corrupted:.3f}, {sum(map(len, self.patched))} edges"

    def _records(self) -> Iterator[dict[str, Any]]:
        return notebook.edges(self.reads, self.sources, patched=self.patched, restored=self.restored)

    def _repr_html_(self) -> str:
        title = f"{self!r}: restored with the clean prompt's vector, 0 nothing, 1 all"
        return notebook.heat(title, self.layout, self.restored)


def align(clean: Sequence[int], corrupted: Sequence[int]) -> list[int | None]:
    """Return for each token of `corrupted` the number of its partner in `clean`, or None.

    Prompts of as many tokens are aligned token by token. Of others the last tokens belong together; before them the
    longest stretches that both have (`difflib`), and between two of these tokens from the right on, as far as both
    sides have some.

    >>> align([1, 2, 3, 9], [1, 7, 2, 3, 9])
    [0, None, 1, 2, 3]
    """
    if len(clean) == len(corrupted):
        return list(range(len(clean)))
    partners: list[int | None] = [None] * len(corrupted)
    partners[-1] = len(clean) - 1
    matcher = SequenceMatcher(None, corrupted[:-1], clean[:-1], autojunk=False)
    for tag, start, end, clean_start, clean_end in matcher.get_opcodes():
        if tag in ("equal", "replace"):
            for back in range(1, min(end - start, clean_end - clean_start) + 1):
                partners[end - back] = clean_end - back
    return partners


def patch(
    model: Model,
    clean: Text,
    corrupted: Text,
    *,
    position: int = -1,
    target: Token | None = None,
    against: Token | None = None,
    edits: Sequence[Edit] = (),
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> Patching:
    """Patch every (read, source) edge of the corrupted prompt with the clean prompt's vector, one at a time, at all
    tokens that have a partner in the clean prompt (`align`).

    The weights of the read stay the corrupted prompt's (`Patch`), other reads of the source see it unpatched.

    Args:
        position: the prediction that is measured is the one after this token of the corrupted prompt, and after its
            partner in the clean one; what comes later plays no part.
        target: the token whose ln p is measured; None is the clean prompt's likeliest.
        against: measure ln p(target) - ln p(against), the difference of logits.
        edits: made in both prompts all the time.
        batch_size: copies in one forward pass. progress: called with the number of edges after each pass.

    Raises:
        UserError: prompts with the same prediction; a position without a partner; tokens that are not there; as
            `predict`.
    """
    model = as_model(model)
    ids, other = prompt_ids(model, clean), prompt_ids(model, corrupted)
    position = position_of(position, other.shape[1])
    aligned = align(ids[0].tolist(), other[0].tolist())[: position + 1]
    end = aligned[-1]
    if end is None:
        raise UserError(
            f"token {position} of the corrupted prompt has no partner in the clean one: choose another position, or "
            "prompts of as many tokens"
        )
    ids, other = ids[:, : end + 1], other[:, : position + 1]
    has_partner = torch.tensor([one is not None for one in aligned])
    places = torch.tensor([one or 0 for one in aligned])
    target_id = None if target is None else token_id(model, target)
    rival = None if against is None else token_id(model, against)
    with intervene(model, *edits):
        vectors = read_vectors(model, ids)
    target_id = int(vectors.log_probs.argmax()) if target_id is None else target_id

    edges = [(i, s) for i, read in enumerate(vectors.layout) for s, one in enumerate(read.sources)]
    changes = []
    for index, place in edges:
        source, vector = vectors.layout[index].sources[place], vectors.sources[index][place]
        make = partial(Patch, source.name, vector[places.to(vector.device)], index)
        changes.append(Change(index, has_partner, None if source.kind == "null" else make))  # zeros are not mixed
    with evaluating(model), torch.no_grad():
        with intervene(model, *edits):
            before, after = (margin(last_log_probs(model, one), target_id, rival).item() for one in (ids, other))
        if abs(before - after) < 1e-6:
            raise UserError("both prompts give the same prediction: there is nothing to restore")
        patched = [math.nan] * len(edges)
        for part, values in each_alone(model, other, edits, changes, (target_id, rival), batch_size, progress):
            for i, value in zip(part, values, strict=True):
                patched[i] = value
    rows = as_rows(patched, [read.sources for read in vectors.layout])
    return Patching(target_id, rival, before, after, vectors.layout, rows, position, aligned)
