"""Tokens -> batches. The windows of a step are computed from (seed, step); nothing is shuffled in memory."""

from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch

from attnres.errors import UserError

_ROUNDS = 6


class Ids(Protocol):
    """Token ids in order: a split of a prepared folder (`Tokens`), or the tokens read so far from a stream."""

    @property
    def folder(self) -> Path: ...

    @property
    def split(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


class Batches:
    """Training batches: windows of `seq_len` + 1 tokens, every one once an epoch, in a seeded order.

    Epoch e starts at an offset o_e < seq_len and takes the windows [o_e + i T, o_e + (i + 1) T], i < `windows`, in a
    permuted order. Steps continue from one epoch into the next. A batch depends on nothing read before, so all variants
    see the same batches and a resumed run continues exactly.

    Args:
        tokens: the ids of a split.
        seq_len: T, predicted tokens of a window.
        batch_size: sequences of a step, over all ranks.
        seed: seed of the offsets and permutations.

    Raises:
        UserError: fewer tokens than one window, or sizes below 1.
    """

    def __init__(self, tokens: Ids, *, seq_len: int, batch_size: int, seed: int = 0) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, expected at least 1")
        if seed < 0:
            raise UserError(f"seed is {seed}, expected 0 or more")
        _check_length(tokens, seq_len)
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        # one less than fit, so that the offset can be anything below seq_len
        self.windows = max(1, len(tokens) // seq_len - 1)
        self._offsets = min(seq_len - 1, len(tokens) - 1 - self.windows * seq_len) + 1

    def at(self, step: int, *, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a step, both int64 (batch_size / world_size, seq_len); targets are shifted
        by one token.

        The batches of all ranks, concatenated in order, are the batch of `world_size` 1.

        Raises:
            UserError: `batch_size` is no multiple of `world_size`, or an id is outside the vocabulary.
        """
        if self.batch_size % world_size:
            raise UserError(f"batch_size {self.batch_size} is no multiple of {world_size} processes")
        assert 0 <= rank < world_size and step >= 0
        share = self.batch_size // world_size
        starts = self.starts(step)[rank * share : (rank + 1) * share]
        rows = torch.from_numpy(np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts.tolist()]))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def starts(self, step: int) -> np.ndarray:
        """Return the first token of each window of a step, (batch_size,) int64."""
        position = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.uint64)
        epoch, index = position // np.uint64(self.windows), position % np.uint64(self.windows)
        key = _mix(_mix(np.full_like(epoch, self.seed)) + epoch)
        offset = _mix(key + np.uint64(_ROUNDS)) % np.uint64(self._offsets)
        return (offset + permuted(index, self.windows, key) * np.uint64(self.seq_len)).astype(np.int64)


def held_out_windows(tokens: Ids, seq_len: int, count: int) -> torch.Tensor:
    """Return non-overlapping windows, evenly spread: int64 (n, seq_len + 1), n = min(count, number that fit).

    >>> held_out_windows(np.arange(100), seq_len=4, count=3).shape
    torch.Size([3, 5])

    Inputs are `[:, :-1]`, targets `[:, 1:]`. The windows are the same for every variant, seed and step.

    Raises:
        UserError: fewer tokens than one window, or sizes below 1.
    """
    starts = held_out_starts(tokens, seq_len, count)
    return torch.from_numpy(np.stack([tokens[start : start + seq_len + 1] for start in starts]))


def held_out_starts(tokens: Ids, seq_len: int, count: int) -> list[int]:
    """Return the first token of each window of `held_out_windows`; raises the same errors."""
    if count < 1:
        raise UserError(f"{count} held-out windows asked for, expected at least 1")
    _check_length(tokens, seq_len)
    fit = (len(tokens) - 1) // seq_len
    count = min(count, fit)
    return [i * fit // count * seq_len for i in range(count)]


def permuted(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return the image of each index in [0, size) under the permutation of a key; uint64, O(1) memory an index.

    A Feistel network on the even number of bits that holds `size`, walked along its cycle until it falls inside
    (Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = index.copy()
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right, keys = out[outside] >> half, out[outside] & mask, key[outside]
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(keys + np.uint64(turn) + (right << np.uint64(8))) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function to uint64 (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(np.ndarray, x ^ (x >> np.uint64(31)))


def _check_length(tokens: Ids, seq_len: int) -> None:
    if seq_len < 1:
        raise UserError(f"seq_len is {seq_len}, expected at least 1")
    if len(tokens) < seq_len + 1:
        raise UserError(
            f"the {tokens.split} split of {tokens.folder} has {len(tokens)} tokens, and one window of "
            f"seq_len {seq_len} needs {seq_len + 1}: give more text"
            + (", hold out more of it" if tokens.split == "val" else "")
            + ", or a smaller seq_len"
        )
