"""Where prepared data and compiled kernels are kept between runs."""

import os
from pathlib import Path

from attnres.paths import user_path


def cache_dir() -> Path:
    """`$ATTNRES_CACHE`, or `attnres` under `$XDG_CACHE_HOME` or `~/.cache`. Not created here."""
    override = os.environ.get("ATTNRES_CACHE")
    if override:
        return user_path(override)
    base = os.environ.get("XDG_CACHE_HOME") or user_path("~/.cache")
    return Path(base) / "attnres"
