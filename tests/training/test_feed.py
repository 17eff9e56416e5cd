"""Batches come in order and ahead, whatever is asked of them; their errors where they are asked for."""

import threading

import pytest
import torch

from attnres.data import Batches, open_tokens
from attnres.errors import UserError
from attnres.training.feed import Feed, Moment, Numbers, to_device

CPU = torch.device("cpu")


def test_batches_are_those_of_their_steps(corpus):
    batches = Batches(open_tokens(corpus), seq_len=16, batch_size=4, seed=0)
    feed = Feed(batches, CPU, rank=1, world_size=2, steps=9)
    for step in (3, 4, 5, 8, 7, 8):  # on from a checkpoint, and out of order
        for ours, theirs in zip(feed.at(step), batches.at(step, rank=1, world_size=2), strict=True):
            assert torch.equal(ours, theirs)
    feed.close()


def test_the_next_batch_is_made_while_a_step_runs():
    made, asked = {step: threading.Event() for step in range(3)}, []

    class Slow:
        def at(self, step, **share):
            asked.append((step, threading.current_thread() is threading.main_thread()))
            made[step].set()
            if step == 2:
                raise UserError("an id is outside the vocabulary")
            return torch.full((1,), step), torch.full((1,), step)

    feed = Feed(Slow(), CPU, rank=0, world_size=1, steps=3)
    assert feed.at(0)[0].item() == 0 and made[1].wait(10)
    assert feed.at(1)[0].item() == 1 and made[2].wait(10)
    with pytest.raises(UserError, match="outside the vocabulary"):
        feed.at(2)
    feed.close()
    assert asked == [(0, True), (1, False), (2, False)]


def test_numbers_and_moments_on_a_device_without_a_clock():
    values = to_device([1, 2], torch.zeros((), dtype=torch.float64))
    assert values.dtype == torch.float64 and Numbers(values).read() == [1.0, 2.0]
    began = Moment.now(CPU)
    assert began.seconds_until(began) == 0 and began.seconds_until(Moment.now(CPU)) > 0
