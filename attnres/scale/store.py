"""The store by which processes find one another, without what an earlier start left in it.

torchrun (2.13) keeps one store when it starts lost processes again, and their groups look for one another under the
same names: a process that is early finds the address of one that is no more, and is refused.
"""

import secrets
import time

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
