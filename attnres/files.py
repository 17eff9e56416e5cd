"""Files that are whole or not there: everything is written beside its place and renamed into it.

A full disk, a missing permission or a killed process leaves what was there before; the first two come out as a
UserError, with the half-written file removed.
"""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from attnres.errors import UserError

LOCK = ".lock"


def in_the_way(folder: Path) -> Path | None:
    """What keeps files from being written into a folder, there or not: the nearest thing that is there and no folder
    this user may write into; None if nothing does. For finding out before hours are spent on what would be written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there


def refuse_full(folder: str | Path) -> None:
    """Raise UserError for a file, or a folder that is not empty, where a new folder is to be."""
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another folder, or empty it")


@contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Raise what keeps the block from writing `path` (a full disk, a missing permission) as a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot write {path}: {reason}; what was there before is intact, make room or choose another folder"
        ) from error


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all; folders above it are made. Raises UserError."""
    path = Path(path)
    temporary = _beside(path)

    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 `text` to `path`, whole or not at all. Raises UserError."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`, whole or not at all. Raises UserError; ValueError for NaN."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file; a missing, unreadable or broken file is a UserError."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): it is damaged or not one of ours") from error


@contextmanager
def replaced_folder(path: str | Path) -> Generator[Path]:
    """An empty folder to fill, which becomes `path` when the block ends and is removed when it raises.

    The folder that was there stays until the new one is complete. A folder cannot be swapped in one step, so the old
    one is first renamed to `.NAME.old`: after a kill in between `recover_folder` brings it back.
    """
    path = Path(path)
    temporary, old = _beside(path), _old(path)

    try:
        with writing(path):
            recover_folder(path)
            temporary.mkdir(parents=True)
            yield temporary
            _sync(temporary)
            if path.exists():
                path.rename(old)
            try:
                temporary.rename(path)
            except OSError:
                recover_folder(path)
                raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover_folder(path: str | Path) -> None:
    """Undo what a kill in the middle of `replaced_folder` left: bring the old folder back, remove half-written ones."""
    path = Path(path)
    old = _old(path)
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    for stray in path.parent.glob(f".{path.name}.*.new"):
        if not _alive(stray):
            shutil.rmtree(stray, ignore_errors=True)


@contextmanager
def locked(folder: str | Path) -> Generator[None]:
    """Keep other processes out of `folder`, which is made if it is missing and removed again if it stays empty.

    The lock is on the file `.lock` in it; the system lets go of it when this process ends, however it ends. Raises
    UserError while another process holds it.
    """
    folder = Path(folder)
    lock = FileLock(folder / LOCK)

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another process is working in {folder}: wait for it, or choose another --out") from None
    try:
        yield
    finally:
        with suppress(OSError):
            if os.listdir(folder) == [LOCK]:
                shutil.rmtree(folder)
        lock.release()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _alive(stray: Path) -> bool:
    """Whether the process that is writing `stray` (its number is in the name) still runs, this one excepted."""
    text = stray.name.split(".")[-2]
    if not text.isdigit() or (number := int(text)) == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sync(folder: Path) -> None:
    """Force the folder's files to disk, so that the rename does not outrun them in a power cut."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
