"""Handle Ctrl-C and SIGTERM between two steps instead of inside one; end a run with the comparison or torchrun that
started it."""

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

PARENT = "ATTNRES_PARENT"
"""Environment variable: the process id of the comparison with which a run is to end."""
LOOK_S = 1.0
"""Seconds between two checks whether that process is running."""


def end_with_parent() -> None:
    """Send this process SIGTERM, on which a run saves and stops, once the process in `PARENT`, or torchrun, is no
    longer its parent. Does nothing without one of them."""
    launcher = str(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""
    parent = os.environ.get(PARENT, launcher)
    if not parent.isdecimal():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


class Signals:
    """Numbers of received signals: `interrupts` (Ctrl-C) and `terminations` (SIGTERM)."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Count the signal; a second Ctrl-C stops the process at once."""
        if number == signal.SIGTERM:
            self.terminations += 1
        elif self.interrupts:
            raise KeyboardInterrupt
        else:
            self.interrupts += 1


@contextmanager
def caught_signals() -> Generator[Signals]:
    """Count Ctrl-C and SIGTERM inside the block instead of ending. Only a process's main thread can; others count
    none."""
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
