"""What was made of a model lately: one thing at a time is made of it, and the latest stay."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from attnres.app.works import Report

KEPT = 16
"""Analyses kept for each model: going back to an earlier edit is then free."""
KEPT_BYTES = 256e6
"""Of their numbers, beyond which all but two go: vocabularies of 150,000 make 300 MB of one long text."""

T = TypeVar("T")


class Kept:
    """Analyses of a model, by what they are of.

    Attributes:
        lock: who runs the model has it: an observer sits on the model, so there is one pass at a time.
    """

    def __init__(self) -> None:
        self.lock, self._made = threading.Lock(), OrderedDict[Hashable, Any]()

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable) -> Any:
        """What was made under a key; None where nothing was, or nothing stayed."""
        with self.lock:
            if key in self._made:
                self._made.move_to_end(key)
            return self._made.get(key)

    def make(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made under a key, or is made now."""
        with self.lock:
            if key in self._made:
                self._made.move_to_end(key)
            else:
                self._made[key] = make()
                while len(self._made) > KEPT:
                    self._made.popitem(last=False)
                sizes = [(old, _bytes(one)) for old, one in self._made.items()]
                total = sum(size for _, size in sizes)
                for old, size in sizes[:-2]:  # what has no arrays, as scores that took long, may stay
                    if size and total >= KEPT_BYTES:
                        del self._made[old]
                        total -= size
            return self._made[key]

    def clear(self) -> None:
        """Nothing stays; for who has the lock."""
        self._made.clear()

    def progress(self, report: Report, total: int) -> Callable[[int], None]:
        """What long work calls with how much more of `total` it has done, the model locked: it reports the sum, and
        others may use the model meanwhile."""
        done = 0

        def progress(more: int) -> None:
            nonlocal done
            done = min(done + more, total)
            self.lock.release()
            try:
                report(done, total)
                time.sleep(0.005)  # long enough for who waits
            finally:
                self.lock.acquire()

        return progress


def _bytes(kept: Any) -> int:
    """How large the tensors and arrays of what is kept of a text are."""
    values = getattr(kept, "__dict__", {}).values()
    arrays = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in arrays if isinstance(one, Tensor | np.ndarray))
