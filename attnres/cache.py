"""Where prepared data and compiled kernels are kept between runs."""

import os
from pathlib import Path

from attnres.errors import UserError
from attnres.files import user_path


def cache_dir() -> Path:
    """`$ATTNRES_CACHE`, or `attnres` under `$XDG_CACHE_HOME` or `~/.cache`. Not created here.

    Raises:
        UserError: nothing says where: a user without a name and a home.
    """
    override = os.environ.get("ATTNRES_CACHE")
    if override:
        return user_path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "attnres"
    except RuntimeError:
        raise UserError(
            "this user has no home folder to keep data and kernels in: name a folder for them in the environment "
            "variable ATTNRES_CACHE"
        ) from None
