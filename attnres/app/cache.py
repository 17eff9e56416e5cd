"""The latest analyses of a model, kept for a while, and who may use the model meanwhile."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

Report = Callable[[int, int], None]
"""Called with how much is done of how much; what it raises ends the work."""

WAIT = 0.2
"""Seconds between two reports of work that another thread does."""
KEPT = 16
"""Analyses kept for each model: going back to an earlier edit is then free."""
KEPT_BYTES = 256e6
"""Of their numbers, beyond which all but two go: vocabularies of 150,000 make 300 MB of one long text."""

T = TypeVar("T")


class Cache:
    """The latest analyses of a model, by what they are of.

    Attributes:
        lock: held by the thread that runs the model: an observer sits on the model, so there is one pass at a time.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.Lock())
        self._made, self._working = OrderedDict[Hashable, Any](), dict[Hashable, tuple[int, int]]()
        self.partial = dict[Hashable, Any]()
        """What work under way has so far, by what it is of."""

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable) -> Any:
        """Return what was made under a key, or None."""
        with self.lock:
            return self._made[key] if self._touch(key) else None

    def make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made under a key, or make it now."""
        with self.lock:
            return self._make(key, make)

    def work(self, key: Hashable, make: Callable[[Callable[[int], None]], T], total: int, report: Report) -> T:
        """Return what was made under a key, or make it now, which takes a while.

        `make` is given a function to call with how much more of `total` it has done. Others may use the model during
        that call; who asks for the same waits for it, and is told by `report` how far it is.
        """
        with self.lock:
            while key in self._working:
                done = self._working[key]
                self.lock.release()
                try:
                    report(*done)
                finally:
                    self.lock.acquire()
                self.lock.wait(WAIT)
            self._working[key] = (0, total)
            try:
                return self._make(key, lambda: make(self.progress(report, total, key)))
            finally:
                del self._working[key]
                self.partial.pop(key, None)
                self.lock.notify_all()

    def clear(self) -> None:
        """Forget everything; for the thread that holds the lock."""
        self._made.clear()

    def progress(self, report: Report, total: int, key: Hashable = None) -> Callable[[int], None]:
        """Return what long work, which holds the lock, calls with how much more of `total` it has done: it reports the
        sum, and others may use the model meanwhile."""
        done = 0

        def progress(more: int) -> None:
            nonlocal done
            done = min(done + more, total)
            if key is not None:
                self._working[key] = (done, total)
            self.lock.release()
            try:
                report(done, total)
                time.sleep(0.005)  # long enough for a thread that waits
            finally:
                self.lock.acquire()

        return progress

    def _touch(self, key: Hashable) -> bool:
        """Make it the latest; return whether it is there."""
        if key in self._made:
            self._made.move_to_end(key)
        return key in self._made

    def _make(self, key: Hashable, make: Callable[[], T]) -> T:
        if not self._touch(key):
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


def _bytes(kept: Any) -> int:
    """Return the bytes of the tensors and arrays of an analysis."""
    values = getattr(kept, "__dict__", {}).values()
    arrays = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in arrays if isinstance(one, Tensor | np.ndarray))
