"""Processes that are started again in the same store find one another, and nobody of an earlier start."""

import threading

import pytest
from torch.distributed import HashStore, Store

from attnres.scale.process_group import fresh_store

RANKS = 3


def start(store: Store, order: list[int]) -> list[bytes]:
    """What each process reads of what the next one wrote, in a start in which they come one after the other."""
    read = [b""] * RANKS

    def process(rank: int) -> None:
        part = fresh_store(store, rank, RANKS, 30)
        part.set(f"address {rank}", f"of start {order}")
        read[rank] = part.get(f"address {(rank + 1) % RANKS}")

    threads = [threading.Thread(target=process, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)  # the next one is late
    for thread in threads:
        thread.join()
    return read


def test_each_start_has_a_part_of_the_store_to_itself():
    store = HashStore()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        assert start(store, order) == [f"of start {order}".encode()] * RANKS


def test_processes_that_never_come_are_not_waited_for_without_end():
    for rank in (0, 1):
        with pytest.raises(TimeoutError, match=f"process {rank} of 2 waited"):
            fresh_store(HashStore(), rank, 2, 0.1)
