"""A function that is called before every change to a file: where a fault is put, or changes are counted."""

import builtins
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Changes:
    """Calls `before` before every change to files below `root` that this process makes, once it is installed.

    Changes are syncs, renames, new and removed folders and files, files that are opened for writing, and what
    safetensors writes by itself.
    """

    def __init__(self, root: Path, before: Callable[[], None]) -> None:
        self.root, self.before = str(root), before

    def install(self) -> None:
        import safetensors
        import safetensors.torch

        files = (os.fsync, os.mkdir, os.rename, os.replace, os.unlink, os.rmdir)
        watched = map(self._watched, files)
        os.fsync, os.mkdir, os.rename, os.replace, os.unlink, os.rmdir = watched  # ty: ignore[invalid-assignment]
        for name in ("write_text", "write_bytes"):  # the others are those of os, and would count twice
            setattr(pathlib.Path, name, self._watched(getattr(pathlib.Path, name)))
        open_ = builtins.open

        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if set(mode) & set("wax+") and str(file).startswith(self.root):
                self.before()
            return open_(file, mode, *rest, **more)

        builtins.open = opened  # ty: ignore[invalid-assignment]
        write = safetensors.serialize_file

        def serialised(*rest: Any, **more: Any) -> Any:
            try:
                self.before()
            except OSError as error:
                raise safetensors.SafetensorError(f"I/O error: {error.strerror} (os error 28)") from error
            return write(*rest, **more)

        for module in (safetensors, safetensors.torch):
            setattr(module, "serialize_file", serialised)  # noqa: B010 (its signature is another)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*rest: Any, **more: Any) -> Any:
            if not rest or isinstance(rest[0], int) or str(rest[0]).startswith(self.root):
                self.before()
            return function(*rest, **more)

        return watched
