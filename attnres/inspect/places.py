"""The places that an edit means, as numbers: reads by name or kind, tokens as a mask, sources that are there."""

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError, unknown
from attnres.residuals import Residual, depths, outputs

Reads = str | int | Collection[str | int] | None
"""Which reads: names ("mlp 3", "attention 2 key", "output"), all of a kind ("mlp") or of a sublayer ("attention 2"),
numbers from 0 (negative ones count from the end), a range; None is all."""
Tokens = Tensor | int | Sequence[int] | None
"""Which tokens: a bool mask (B, T) or (T,), or positions in each row (negative ones from the end); None is all."""


def with_choice(sources: Sequence[str], reads: Sequence[int], residual: Residual) -> list[int]:
    """Those of the reads that have one of the sources and another one too; all of them where none does."""
    layout = residual.layout()
    rows = {index: [source.name for source in layout[index].sources] for index in reads}
    return [index for index, row in rows.items() if len(row) > 1 and set(sources) & set(row)] or list(reads)


def choose_reads(reads: Reads, names: Sequence[str]) -> list[int]:
    """The numbers of the reads meant by `reads`, out of those called `names`.

    Raises:
        UserError: there is no such read, one is given twice, or none at all.
    """
    if reads is None:
        return list(range(len(names)))
    numbers = []
    members: Any = [reads] if isinstance(reads, str | int | Integral) else reads
    for read in members:
        if isinstance(read, str):
            of_kind = [index for index, name in enumerate(names) if read in (name, *_groups(name))]
            if not of_kind:
                raise unknown("read", read, {*names, *(group for name in names for group in _groups(name))})
            numbers += of_kind
        elif _is_number(read) and -len(names) <= read < len(names):
            numbers.append(int(read) % len(names))
        else:
            raise UserError(f"read {read!r}: expected a name such as 'mlp 0', or a number from 0 to {len(names) - 1}")
    if not numbers:
        raise UserError("no reads are given: name one, or pass None for all")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"a read is given twice in {', '.join(names[index] for index in numbers)}: name each once")
    return numbers


def _groups(name: str) -> list[str]:
    """What a read of that name is one of: "mlp" of "mlp 3"; "attention" and "attention 2" of "attention 2 key"."""
    parts = name.split(" ")
    return [" ".join(parts[:count]) for count in range(1, len(parts))]


def token_mask(tokens: Tokens, shape: Sequence[int], device: torch.device) -> Tensor | None:
    """(B, T) or (T,) bool: which of a pass's tokens are meant; None is all.

    Raises:
        UserError: a mask of another shape, or a position that is not in the pass.
    """
    if tokens is None:
        return None
    length = shape[1]
    if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        if tuple(tokens.shape) not in ((length,), tuple(shape)):
            raise UserError(
                f"the edit's mask of tokens has shape {tuple(tokens.shape)}, the forward pass {tuple(shape)}: give one "
                "of the pass's shape"
            )
        return tokens.to(device)
    positions = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    mask = torch.zeros(length, dtype=torch.bool)
    for position in [positions] if isinstance(positions, int | Integral) else positions:
        mask[position_of(position, length)] = True
    return mask.to(device)


def _is_number(value: Any) -> bool:
    """Whether it is a whole number, numpy's included."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def position_of(position: Any, length: int) -> int:
    """The number of a token, from 0 on, in a pass of `length`. Raises UserError."""
    if not _is_number(position) or not -length <= position < length:
        raise UserError(
            f"position {position!r} in a text of {length} tokens: expected 0 to {length - 1}, or -1, the last"
        )
    return int(position) % length


def source_names_of(source: str | Sequence[str]) -> Sequence[str]:
    """One name or several as a sequence. Raises UserError."""
    names = (source,) if isinstance(source, str) else source
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the source is {source!r}: expected a name such as 'embedding', or several")
    return names


def check_sources(names: Sequence[str], reads: Sequence[int], residual: Residual) -> None:
    """Raise a UserError unless each source is among those of at least one of the reads."""
    layout = residual.layout()
    rows = [[source.name for source in read.sources] for read in layout]
    if not names:
        raise UserError("no source is given: name one, such as 'embedding'")
    for name in names:
        if any(name in rows[index] for index in reads):
            continue
        last = max(reads)
        has = f"'{layout[last].name}' reads {', '.join(rows[last])}"
        written = [output.name for output in outputs(residual.num_sublayers + 1, residual.sublayers)]
        if name in written:
            number = written.index(name)
            if number > depths(layout)[last]:
                raise UserError(f"source '{name}' is written after read '{layout[last].name}': choose a later read")
            holders = [f"'{s.name}'" for s in layout[last].sources if s.span is not None and number in s.span]
            where = f"inside {' and '.join(holders)}" if holders else "inside other sources"
            raise UserError(f"'{name}' is no source of its own but {where}: {has}; give one of these")
        first = next((index for index, row in enumerate(rows) if name in row), None)
        if first is not None:
            raise UserError(
                f"no selected read has the source '{name}': '{layout[first].name}' is the first that has it; {has}"
            )
        raise unknown("source", name, {name for index in reads for name in rows[index]})
