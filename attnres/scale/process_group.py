"""Rendezvous of processes under torchrun, and recognition of the errors of a lost process.

torchrun (2.13) keeps its store when it restarts lost processes, and their groups use the same keys: a process that is
early finds the address of one that has ended, and is refused. `fresh_store` gives each start of all processes a part of
the store for itself.
"""

import secrets
import time

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

POLL_S = 0.02


def fresh_store(store: Store, rank: int, world_size: int, patience_s: float) -> Store:
    """Return a part of the store that belongs to this start of all processes, once all of them agree on it.

    Each process publishes a random number; the first sends each one the name of the part together with that number,
    until all have answered. Messages of an earlier start hold other numbers, and are not answered.

    Raises:
        TimeoutError: not all of them answer.
    """
    until, number = time.monotonic() + patience_s, secrets.token_hex(8)
    name = number if rank == 0 else ""
    others, left = range(1, world_size), set(range(1, world_size)) if rank == 0 else {rank}
    if rank:
        store.set(f"attnres/number/{rank}", number)
    while left:
        if rank == 0:
            for other in others:
                if store.check([f"attnres/number/{other}"]):
                    heard = store.get(f"attnres/number/{other}").decode()
                    store.set(f"attnres/name/{other}", f"{heard} {name}")
            left = {other for other in left if not store.check([f"attnres/answer/{name}/{other}"])}
        elif store.check([f"attnres/name/{rank}"]):
            heard, name = store.get(f"attnres/name/{rank}").decode().split()
            if heard == number:
                store.set(f"attnres/answer/{name}/{rank}", "")
                left = set()
        if left and time.monotonic() > until:
            raise TimeoutError(f"process {rank} of {world_size} waited {patience_s:.0f} s for the others to start")
        if left:
            time.sleep(POLL_S)
    return PrefixStore(f"attnres/start/{name}", store)


WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
    "failed to recv",
    "failed to send",
)
"""Parts of messages of gloo, NCCL and torch's store, which raise no specific exception class."""


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error, or one that it wraps or was raised from, means that another process was lost."""
    looked_at = set[int]()
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in looked_at:
            continue
        looked_at.add(id(one))
        if isinstance(one, dist.DistNetworkError) or any(word in str(one) for word in WORDS):
            return True
        wrapped = getattr(one, "failures", None)  # of a checkpoint's: by rank, each with its traceback
        left += [one.__cause__, one.__context__, *(pair[0] for pair in (wrapped or {}).values())]
    return False
