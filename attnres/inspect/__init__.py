"""What depth attention does, seen from inside a running model."""

from .record import Trace, read_names, record

__all__ = ["Trace", "read_names", "record"]
