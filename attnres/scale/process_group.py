"""Let processes find one another under torchrun, and recognise the errors that say that one of them is lost.

torchrun (2.13) keeps one store when it starts lost processes again, and their groups look for one another under the
same names: a process that is early finds the address of one that is gone, and is refused. `fresh_store` gives each
start of all processes a part of the store of its own.
"""

import secrets
import time

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

POLL_S = 0.02


def fresh_store(store: Store, rank: int, world_size: int, patience_s: float) -> Store:
    """Return a part of the store that belongs to this start of all processes, once all of them agree on it.

    Each process says a number of its own; the first gives each one the name of the part with the number it heard, until
    all have answered. What was said in an earlier start has other numbers, and nobody answers to it.

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
"""Of gloo, NCCL and torch's store, whose errors have no class of their own."""


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error, or one that it wraps or comes from, is that another process is gone."""
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
