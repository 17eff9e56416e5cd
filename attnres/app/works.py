"""Long work that several may ask for at once: one does it, the others wait for it and see how far it is."""

import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field

Report = Callable[[int, int], None]
"""Called with how much is done of how much; what it raises ends the work."""

WAIT = 0.2
"""Seconds between two reports of work that another does."""


@dataclass
class _Work:
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: tuple[int, int] = (0, 1)
    asked: int = 0


class Works:
    """What is under way, by key."""

    def __init__(self) -> None:
        self._lock, self._works = threading.Lock(), dict[Hashable, _Work]()

    @contextmanager
    def alone(self, key: Hashable, report: Report) -> Generator[Report]:
        """While it lasts nobody else is at the work of that key; yields what to report to. Until it begins, `report` is
        called with what another has done."""
        with self._lock:
            work = self._works.setdefault(key, _Work())
            work.asked += 1
        try:
            while not work.lock.acquire(timeout=WAIT):
                report(*work.done)

            def note(done: int, whole: int) -> None:
                work.done = (done, whole)
                report(done, whole)

            try:
                yield note
            finally:
                work.lock.release()
        finally:
            with self._lock:
                work.asked -= 1
                if not work.asked:
                    del self._works[key]
