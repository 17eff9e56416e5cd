"""Paths as a user names them, locks between processes, and files that are written whole or not at all.

Everything is written beside its place and renamed into it.

A full disk, a missing permission or a killed process leaves what was there before; the first two come out as a
UserError, with the half-written file removed.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from attnres.errors import UserError, first_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def user_path(name: str | Path) -> Path:
    """Return the path that a user named, with its `~`.

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
        raise UserError(f"'{name}' begins with an unknown home folder: write the whole path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        shown = str(name).encode("utf-8", "replace").decode()
        raise UserError(f"'{shown}' cannot be looked up ({reason}): give the path of a file or folder") from None
    return path


def refuse_special(path: Path) -> None:
    """Refuse with a UserError a path that is neither a file nor a folder: reading a pipe would block for ever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
        raise UserError(f"{path} is {kind}: expected a file; write what comes out of it into one first")


class Taken(Exception):
    """Raised if another process holds the lock."""


@contextmanager
def lock(path: Path, *, wait: bool) -> Generator[int]:
    """Lock a file, created if missing and removed at the end; give its descriptor.

    Args:
        wait: wait while another process holds the lock.

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
            if is_same_file(handle, path):  # the process that held the lock before may have removed the file
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
    """Return whether an open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


LOCK = ".lock"
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]
"""Identifies this machine, with the process id, in the names of half-written files; a hash, because the names of a
cluster's nodes may begin alike."""
_WRITER = re.compile(r"\..+\.(?:(?P<host>[a-z0-9-]+)-)?(?P<process>[0-9]+)\.new")
"""Matches the name of a half-written file; names of earlier versions lack the machine."""


def in_the_way(folder: Path) -> Path | None:
    """Return the path that prevents writing into a folder, which need not exist: its nearest existing ancestor, if that
    is no writable folder; else None. Called before hours are spent on the content."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return None if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK) else nearest


@contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Raise an OSError of the block (full disk, missing permission) as a UserError about writing `path`."""
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
            _remove_strays(path.parent.glob(f".{glob.escape(path.name)}.*.new"))
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 `text` to `path`, whole or not at all. Raises UserError."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`, whole or not at all. Raises UserError; ValueError for NaN."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


@contextmanager
def replaced_folder(path: str | Path) -> Generator[Path]:
    """Give an empty folder, which replaces `path` when the block ends and is removed when it raises.

    The old folder stays until the new one is complete. A folder cannot be swapped in one step, so the old one is first
    renamed to `.NAME.old`; after a kill in between `recover_folder` restores it.
    """
    path = _place(path)
    temporary, old = _beside(path), _old(path)

    try:
        with writing(path):
            recover_folder(path)
            temporary.mkdir(parents=True)
            yield temporary
            _sync(temporary)
            try:
                if path.exists():
                    path.rename(old)
                temporary.rename(path)
            except BaseException:  # also for a Ctrl-C
                recover_folder(path)
                raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def by_step(folder: Path, suffix: str) -> dict[int, Path]:
    """Return the files STEP.SUFFIX of a folder by their steps, in order."""
    files = sorted(folder.glob(f"*.{suffix}"))
    return {int(path.stem): path for path in files if re.fullmatch("[0-9]{1,18}", path.stem) and path.is_file()}


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy each file into `folder`, under its key as its name. Raises UserError for a file that cannot be read."""
    for name, path in files.items():
        try:
            file = path.open("rb")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; the target is unchanged") from error
        with file, (folder / name).open("wb") as copy:
            shutil.copyfileobj(file, copy)


def recover_folder(path: str | Path) -> None:
    """Repair a folder after a kill inside `replaced_folder`: restore the old folder, remove half-written ones."""
    path = _place(path)
    old = _old(path)
    if old.is_dir() and not path.exists():
        old.rename(path)
    _remove(old)
    _remove_strays(path.parent.glob(f".{glob.escape(path.name)}.*.new"))


def is_half_written(name: str) -> bool:
    """Return whether a file name is that of a half-written file, of a running or a killed process."""
    return _WRITER.fullmatch(name) is not None


def _remove_strays(files: Iterable[Path]) -> None:
    """Remove half-written files of processes that have ended."""
    for stray in files:
        writer = _WRITER.fullmatch(stray.name)
        # A process on another machine that writes to the same folder (a cluster's) may be running.
        if writer is not None and writer["host"] in (None, _HOST) and not _alive(int(writer["process"])):
            _remove(stray)


@contextmanager
def locked(folder: str | Path) -> Generator[Callable[[], bool]]:
    """Keep other processes out of `folder`, which is created if missing, and removed with its new parents if it stays
    empty.

    The lock is on the file `.lock` in it; the system releases it when this process ends, however it ends. Half-written
    files of killed processes are removed. Gives a function that returns whether the folder at this path is still the
    locked one, since it may be renamed or removed meanwhile. Raises UserError while another process holds the lock.
    """
    folder = Path(folder)
    above = [path for path in folder.parents if not path.exists()]

    with ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                handle = stack.enter_context(lock(folder / LOCK, wait=False))
            except Taken:
                raise UserError(
                    f"another process is working in {folder}: wait for it, or choose another --out"
                ) from None
            _remove_strays(list(folder.rglob(".*.new")))
        try:
            yield lambda: is_same_file(handle, folder / LOCK)
        finally:
            with suppress(OSError):
                if os.listdir(folder) == [LOCK] and is_same_file(handle, folder / LOCK):
                    shutil.rmtree(folder)
                    for path in above:
                        path.rmdir()


def _place(path: str | Path) -> Path:
    """Return the folder to be replaced; for a link, the folder that it leads to. Raises UserError for the current
    folder."""
    place = Path(path).resolve()
    if place == Path.cwd():
        raise UserError("the current folder was given to be written, and a shell stands in it: give a folder in it")
    return place


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _remove(path: Path) -> None:
    """Remove a file or a folder, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _alive(process: int) -> bool:
    """Return whether a process other than this one is running."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _sync(folder: Path) -> None:
    """Flush the folder's files to disk, so that a power cut cannot leave the rename without them; and give them the
    permissions of the umask, because safetensors writes files readable by their owner only."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())


def cache_dir() -> Path:
    """Return `$ATTNRES_CACHE`, or `attnres` under `$XDG_CACHE_HOME` or `~/.cache`, without creating it.

    Raises:
        UserError: none of these is set and the user has no home folder.
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
