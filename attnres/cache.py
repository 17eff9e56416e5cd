"""Where prepared data and compiled kernels are kept between runs."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$ATTNRES_CACHE`, or `attnres` under `$XDG_CACHE_HOME` or `~/.cache`. Not created here."""
    override = os.environ.get("ATTNRES_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attnres"
