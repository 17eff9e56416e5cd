"""A cache of a model's latest analyses, and the lock that lets one thread at a time run the model."""

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
    """The latest analyses of a model by key: the kind of analysis and everything that it depends on.

    Attributes:
        lock: held by the thread that runs the model: an observer sits on the model, so there is one pass at a time.
        partial: the results so far of work that is under way, by the same keys.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.Lock())
        self._made, self._working = OrderedDict[Hashable, Any](), dict[Hashable, tuple[int, int]]()
        self.partial = dict[Hashable, Any]()

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable) -> Any:
        """Return the analysis of a key, or None where there is none."""
        with self.lock:
            return self._made[key] if self._touch(key) else None

    def make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the analysis of a key; call `make` where there is none yet."""
        with self.lock:
            return self._make(key, make)

    def work(self, key: Hashable, make: Callable[[Callable[[int], None]], T], total: int, report: Report) -> T:
        """Return the cached analysis of a key, or compute it with `make` and show its progress to the caller.

        `make` gets a function that it calls now and then with the number of units done since its last call, out of
        `total`. Other threads may use the model during such a call. A thread that asks for an analysis which another
        one is making waits for that one; `report` is called for it, too.
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
        """Drop all analyses. The caller holds the lock."""
        self._made.clear()

    def progress(self, report: Report, total: int, key: Hashable = None) -> Callable[[int], None]:
        """Return the function that long work calls with the number of units done since its last call. It reports the
        sum and lets go of the lock for a moment, so that other threads may use the model."""
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
        """Mark the analysis of a key as the latest used; return whether there is one."""
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
            for old, size in sizes[:-2]:  # scores took long and hold no arrays: they may stay
                if size and total >= KEPT_BYTES:
                    del self._made[old]
                    total -= size
        return self._made[key]


def _bytes(kept: Any) -> int:
    """Return the bytes of the tensors and arrays of an analysis."""
    values = getattr(kept, "__dict__", {}).values()
    arrays = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in arrays if isinstance(one, Tensor | np.ndarray))
