"""Paths as a user names them."""

import os
import stat
from pathlib import Path

from attnres.errors import UserError, first_line


def user_path(name: str | Path) -> Path:
    """The path that a user named, with its `~`.

    Raises:
        UserError: no name, nobody's `~`, or a name that no file can have.
    """
    if isinstance(name, str) and not name.strip():
        raise UserError("an empty name was given: expected the path of a file or folder")
    try:
        path = Path(name).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except RuntimeError:
        raise UserError(f"'{name}' begins with a home folder that cannot be told: write the whole path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        shown = str(name).encode("utf-8", "replace").decode()
        raise UserError(f"'{shown}' cannot be looked up ({reason}): give the path of a file or folder") from None
    return path


def refuse_special(path: Path) -> None:
    """Refuse with a UserError what is there and is neither a file nor a folder: a pipe would be waited for for ever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
        raise UserError(f"{path} is {kind}: expected a file; write what comes out of it into one first")
