"""Locks between processes, which the system lets go of however a process ends."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Taken(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(path: Path, *, wait: bool) -> Generator[int]:
    """Hold the lock on a file, which is made where it is missing and removed at the end; gives its descriptor.

    Args:
        wait: for another process that holds it.

    Raises:
        Taken: another process holds it, without `wait`.
        OSError: the file cannot be made, or its file system or this system has no locks.
    """
    if fcntl is None:
        raise OSError("attnres locks files as Linux and macOS do, which this system does not")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if is_same_file(handle, path):  # not removed by the one that held it before
                break
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            raise Taken(path) from None
        except OSError:
            os.close(handle)
            raise
    try:
        yield handle
    finally:
        with suppress(OSError):
            if is_same_file(handle, path):
                path.unlink()
        os.close(handle)


def is_same_file(handle: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
