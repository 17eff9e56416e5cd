"""Ctrl-C and SIGTERM between two steps instead of in the middle of one."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """Counts of the signals that came: `interrupts` (Ctrl-C) and `terminations` (SIGTERM)."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; a second Ctrl-C stops at once, as without us."""
        if number == signal.SIGTERM:
            self.terminations += 1
        elif self.interrupts:
            raise KeyboardInterrupt
        else:
            self.interrupts += 1


@contextmanager
def caught_signals() -> Generator[Signals]:
    """Count Ctrl-C and SIGTERM instead of dying of them; only the main thread of a process may, others count none."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
