"""One computed run in a process of its own: `python -m lab.work RUN.json`.

The file names a function of `lab.studies` and its arguments; what that returns is kept in the run's folder.
"""

import importlib
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.comparison.children import Child
from attnres.errors import ERROR_FILE, UserError
from attnres.files import write_json
from attnres.reading import read_json
from attnres.stats import plain
from lab.rows import MEASURES

HOME = "lab.studies."
"""Where the functions are: a file names no others."""


@dataclass
class Computation(Child):
    """A run that is one function call; its `config` names the function, its arguments and its folder."""

    saves: bool = False

    def variables(self) -> dict[str, str]:
        """Return what the environment of its process has besides: this package too is the one of this process."""
        variables = super().variables()
        home = str(Path(__file__).parents[1])
        return variables | {"PYTHONPATH": os.pathsep.join([home, variables["PYTHONPATH"]])}

    def command(self, *, quiet: bool) -> list[str]:
        """Return the words of the command that computes it."""
        return [sys.executable, "-m", "lab.work", str(self.config)]


def function(name: str) -> Any:
    """Return the function called "lab.studies.FILE:NAME". Raises UserError for any other."""
    module, _, attribute = name.partition(":")
    if not module.startswith(HOME) or not attribute.isidentifier():
        raise UserError(f"'{name}' is no function of a study: expected {HOME}FILE:NAME")
    return getattr(importlib.import_module(module), attribute)


def work(path: Path) -> None:
    """Compute the run that a file names and write RUN/measures.json. Raises UserError."""
    run = read_json(path)
    rows = plain(function(run["function"])(**run["arguments"]), digits=17)
    write_json(Path(run["folder"]) / MEASURES, {key: run[key] for key in ("function", "arguments")} | {"rows": rows})


def main() -> None:
    """Carry out the command; a user's error goes to the study that started it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        work(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        with suppress(KeyError, OSError):
            Path(os.environ[ERROR_FILE]).write_text(str(error), encoding="utf-8")
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
