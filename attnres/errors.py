"""What the user did wrong, in one sentence."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend: the message says what was given, what was expected and what to do.

    The command line prints the message without a traceback and exits with status 2.
    """


def unknown(kind: str, given: str, valid: Iterable[str]) -> UserError:
    """An error for a name that does not exist, with the nearest one that does.

    >>> str(unknown("residual", "blokc", ["block", "full"]))
    "unknown residual 'blokc': did you mean 'block'? Valid: block, full"
    """
    names = sorted(valid)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return UserError(f"unknown {kind} '{given}': {hint}Valid: {', '.join(names)}")
