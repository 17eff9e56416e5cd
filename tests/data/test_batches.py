"""Batch order is a function of (seed, step), for any world size."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnres.data import Batches, Prepared, Tokens, held_out_windows
from attnres.data.batches import permuted
from attnres.errors import UserError


class Counting:
    """Tokens 0, 1, 2, ...: a window says where it was read."""

    folder, split, vocab_size = Path("counting"), "train", 1 << 40

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, span: slice) -> np.ndarray:
        assert span.stop <= self.length
        return np.arange(span.start, span.stop)


def counting(length: int) -> Tokens:
    return cast(Tokens, Counting(length))


seq_lens, seeds, steps = st.integers(1, 20), st.integers(0, 2**31), st.integers(0, 10_000)


@st.composite
def batches(draw: st.DrawFn, smallest: int = 1) -> Batches:
    seq_len = draw(seq_lens)
    length = draw(st.integers(seq_len + 1, 60 * seq_len + 1))
    return Batches(counting(length), seq_len=seq_len, batch_size=draw(st.integers(smallest, 12)), seed=draw(seeds))


@given(batches=batches(smallest=12), step=steps, world_size=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_ranks_join_to_the_global_batch(batches: Batches, step: int, world_size: int):
    parts = [batches.at(step, rank=rank, world_size=world_size) for rank in range(world_size)]
    inputs, targets = batches.at(step)
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


@given(batches=batches(), step=steps, others=st.lists(steps, max_size=4))
def test_a_step_does_not_depend_on_what_was_read_before(batches: Batches, step: int, others: list[int]):
    first = batches.at(step)
    for other in others:
        batches.at(other)
    fresh = Batches(batches.tokens, seq_len=batches.seq_len, batch_size=batches.batch_size, seed=batches.seed)
    for again in (batches.at(step), fresh.at(step)):
        assert all(map(torch.equal, first, again))


@given(batches=batches(), epoch=st.integers(0, 5))
def test_each_window_is_seen_once_an_epoch(batches: Batches, epoch: int):
    size, count, length = batches.batch_size, batches.windows, batches.seq_len
    first, last = epoch * count, (epoch + 1) * count
    order = np.concatenate([batches.starts(step) for step in range(first // size, (last - 1) // size + 1)])
    starts = sorted(order[first % size :][:count].tolist())
    assert starts == [starts[0] + i * length for i in range(count)]
    assert 0 <= starts[0] < length
    assert starts[-1] + length + 1 <= len(batches.tokens)
    assert len(batches.tokens) - count * length <= 2 * length  # all but the ends is read


@given(batches=batches(), step=steps)
def test_targets_are_the_inputs_one_further(batches: Batches, step: int):
    inputs, targets = batches.at(step)
    assert inputs.shape == targets.shape == (batches.batch_size, batches.seq_len)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert inputs.is_contiguous() and targets.is_contiguous()


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_one(size: int, key: int):
    index = np.arange(size, dtype=np.uint64)
    image = permuted(index, size, np.full(size, key, dtype=np.uint64))
    assert sorted(image.tolist()) == list(range(size))


def test_permutation_is_spread_evenly():
    """Each of 5 places is taken by each of 5 indices about equally often (chi-square, 16 degrees of freedom)."""
    trials, size = 20_000, 5
    counts = np.zeros((size, size))
    keys = np.random.default_rng(0).integers(0, 2**63, trials).astype(np.uint64)
    for index in range(size):
        image = permuted(np.full(trials, index, dtype=np.uint64), size, keys)
        counts[index] = np.bincount(image.astype(np.int64), minlength=size)
    expected = trials / size
    assert ((counts - expected) ** 2 / expected).sum() < 60


def test_seeds_and_epochs_order_windows_differently():
    def order(seed: int, epoch: int) -> list[int]:
        return Batches(counting(10_001), seq_len=10, batch_size=999, seed=seed).starts(epoch).tolist()

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert abs(np.corrcoef(orders[0], np.arange(999))[0, 1]) < 0.1


def test_order_is_the_same_in_every_version():
    batches = Batches(counting(100_000), seq_len=64, batch_size=4, seed=7)
    assert batches.starts(0).tolist() == [50739, 92531, 57843, 31475]
    assert batches.starts(1000).tolist() == [75179, 85419, 82987, 98987]


@given(seq_len=seq_lens, length=st.integers(21, 2000), count=st.integers(1, 50))
def test_held_out_windows_do_not_overlap_and_are_spread_evenly(seq_len: int, length: int, count: int):
    windows = held_out_windows(counting(length), seq_len, count)
    fit = (length - 1) // seq_len
    assert windows.shape == (min(count, fit), seq_len + 1)
    gaps = windows[:, 0].diff()
    if len(gaps):
        assert gaps.min() >= seq_len
        assert gaps.max() - gaps.min() <= seq_len


def test_held_out_windows_come_from_the_held_out_documents(prepared: Prepared):
    tokens = prepared.tokens("val")
    windows = held_out_windows(tokens, 32, 8)
    assert torch.equal(windows[0], torch.from_numpy(tokens[0:33]))
    assert windows.dtype == torch.int64


def test_batches_read_the_tokens_that_were_prepared(prepared: Prepared):
    tokens = prepared.tokens("train")
    batches = Batches(tokens, seq_len=16, batch_size=4, seed=3)
    inputs, targets = batches.at(11)
    for row, start in enumerate(batches.starts(11).tolist()):
        assert inputs[row].tolist() == tokens[start : start + 16].tolist()
        assert targets[row].tolist() == tokens[start + 1 : start + 17].tolist()


def test_corpus_smaller_than_one_window_is_refused(prepared: Prepared):
    for split in ("train", "val"):
        with pytest.raises(UserError, match=rf"{split} split of .* has \d+ tokens, and one window of seq_len 100000"):
            held_out_windows(prepared.tokens(split), 100_000, 4)
    with pytest.raises(UserError, match="one window of seq_len 16 needs 17"):
        Batches(counting(16), seq_len=16, batch_size=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0, "batch_size": 1}, "seq_len is 0"),
        ({"seq_len": 1, "batch_size": 0}, "batch_size is 0"),
        ({"seq_len": 1, "batch_size": 1, "seed": -1}, "seed is -1"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, int], message: str):
    with pytest.raises(UserError, match=message):
        Batches(counting(100), **arguments)


def test_batch_that_does_not_divide_among_processes_is_refused():
    with pytest.raises(UserError, match="batch_size 4 is no multiple of 3 processes"):
        Batches(counting(100), seq_len=4, batch_size=4).at(0, rank=0, world_size=3)


def test_no_windows_asked_for_is_refused():
    with pytest.raises(UserError, match="0 held-out windows"):
        held_out_windows(counting(100), 4, 0)
