"""The exceptions that the command line turns into one sentence and an exit status."""

import difflib
import errno
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

DEBUG = "ATTNRES_DEBUG"
"""Environment variable that --debug sets: errors come with their traceback, libraries say what they report."""
ERROR_FILE = "ATTNRES_ERROR_FILE"
"""Environment variable: the file into which `attnres` writes an error's sentence instead of printing it."""
USER_FILE = "attnres_plugin_"
"""Prefix of the module names that user files get (`imports.from_file`)."""


class UserError(ValueError):
    """A mistake the user can mend: the message says what was given, what was expected and what to do.

    The command line prints the message without a traceback and exits with status 2. Values that the message quotes are
    `shortened`.
    """

    def __init__(self, message: str):
        super().__init__(shortened(message))


class Interrupted(Exception):
    """Raised when a signal stopped a command. The message says what is saved; `code` is the exit status (130 or
    143)."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@contextmanager
def left_when_stopped(left: Callable[[], str]) -> Generator[None]:
    """Raise `Interrupted` in place of a Ctrl-C in the block, with the sentence that `left` returns: what is saved, and
    how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(left(), 130) from None


def shortened(message: str) -> str:
    """Shorten a message: quoted values to 200 characters, words without quotes to 400, the whole to 2,000.

    >>> len(shortened(f"'{'x' * 3000}' is no number"))
    198
    """

    def cut(text: str, first: int, last: int) -> str:
        return text if len(text) <= first + last + 20 else f"{text[:first]}...{text[-last:]}"

    # no quotes inside, or the text between two quoted values would match
    message = re.sub(r"(?<!\w)(['\"])([^'\"]{200,})\1", lambda one: f"{one[1]}{cut(one[2], 120, 60)}{one[1]}", message)
    message = re.sub(r"\S{400,}", lambda one: cut(one[0], 300, 80), message)
    return cut(message, 1500, 480)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, for use inside a sentence; its type if it has no message.

    >>> first_line(OSError("no such repository.\\nTraceback ...")), first_line(KeyError())
    ('no such repository', 'KeyError')
    """
    return shortened(next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".: "))


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of a library written in Rust, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: Python's, a GPU's, or that of tensors on a CPU, whose error has no class."""
    words = str(error) if isinstance(error, RuntimeError) else ""
    of_cpu = "DefaultCPUAllocator" in words and ("can't allocate memory" in words or "not enough memory" in words)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or of_cpu


_ROOM = "make room"
_RIGHTS = "let this user in, or name another place (HOME, TMPDIR and ATTNRES_CACHE say where what is not named goes)"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EMFILE: "let a process open more files, with ulimit -n 4096",
    errno.ENFILE: "this machine has too many open files: end other programs",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.EAGAIN: "let this user have more processes, with ulimit -u, or end some",
    errno.EIO: "look at the disk or the network that it is on",
    errno.ESTALE: "look at the network that it is on",
    errno.ENAMETOOLONG: "give shorter names",
    errno.ELOOP: "mend the links that lead to one another",
}
"""Advice for errors of the operating system, by errno."""


def refusal(error: BaseException) -> str | None:
    """Return a sentence for what the system refused (files, processes, space, permissions, names), or None for another
    error."""
    if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding():
        return (
            f"the locale's encoding {error.encoding} has no sign for a character of a file's name "
            f"{error.object!r}: choose another name, or set PYTHONUTF8=1"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        error = BlockingIOError(errno.EAGAIN, "no further thread")
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error.strerror):
        return f"{first_line(error)}: name a folder that can be written in the environment variable TMPDIR"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was removed: go into one that is there"
    if error.errno not in _ADVICE:
        return None
    advice = _ADVICE[error.errno]
    what = f"write {error.filename or 'its output'}" if advice is _ROOM else f"use {error.filename or 'this system'}"
    return f"cannot {what} ({error.strerror}): {advice}"


def user_file_fault(error: BaseException) -> UserError | None:
    """Return an exception raised inside a user's FILE.py as a UserError; None for others."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(USER_FILE)
    ]
    if not lines:
        return None
    file, line = lines[-1]
    return UserError(
        f"{file} fails in line {line} ({type(error).__name__}: {first_line(error)}): fix it; attnres check "
        "FILE.py:CLASS checks a mechanism"
    )


@contextmanager
def foreign(what: str, advice: str) -> Generator[None]:
    """Raise any exception of the block as a UserError, for blocks that run another library or code on a user's input.

    Args:
        what: the failure, e.g. "config.json of gpt2 makes no config"; the cause's first line follows in brackets.
        advice: what the user can do.

    >>> with foreign("x makes no number", "write digits"):
    ...     int("x")
    Traceback (most recent call last):
    attnres.errors.UserError: x makes no number (invalid literal for int() with base 10: 'x'): write digits
    """
    try:
        yield
    except (UserError, Interrupted, BrokenPipeError):
        raise
    except RecursionError as error:
        raise UserError(f"{what} (nested too deep): {advice}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise (user_file_fault(error) or UserError(f"{what} ({first_line(error)}): {advice}")) from error


def require(module: str, sentence: str) -> Any:
    """Import an optional module. Raises UserError with `sentence` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(sentence) from error


def install(extra: str) -> str:
    """Return the command that installs an extra of this package.

    >>> install("data")
    "pip install 'attention-residuals[data]'"
    """
    return f"pip install 'attention-residuals[{extra}]'"


def unknown(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest valid one.

    >>> str(unknown("residual", "blokc", ["block", "full"]))
    "unknown residual 'blokc': did you mean 'block'? Valid are block, full"
    >>> str(unknown("setting of residual 'standard'", "heads", []))
    "'heads' is no setting of residual 'standard', which has none: leave it out"
    """
    names = sorted(valid)
    if not names:
        return UserError(f"'{name}' is no {kind}, which has none: leave it out")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? Valid are" if near else "valid are"
    return UserError(f"unknown {kind} '{name}': {hint} {', '.join(names)}")
