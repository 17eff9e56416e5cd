"""The licence of every locked package that is installed, as a table:
`python fuzz/licences.py docs/project/licences.md`."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any


def licence(package: importlib.metadata.Distribution) -> str:
    """What a package's metadata says its licence is: the SPDX expression, else its classifiers, else the first line; of
    a package that says nothing there, what its licence file is known by."""
    about: Any = package.metadata
    classified = [name.split(" :: ")[-1] for name in about.get_all("Classifier") or [] if name.startswith("License")]
    text = about.get("License-Expression") or "; ".join(name for name in classified if name != "OSI Approved")
    return text or next(iter((about.get("License") or "").strip().splitlines()), "")[:60] or _by_file(package)


def _by_file(package: importlib.metadata.Distribution) -> str:
    for file in package.files or ():
        if file.name.startswith("LICENSE"):
            words = " ".join(Path(str(package.locate_file(file))).read_text(encoding="utf-8").split())
            if "Redistribution and use in source and binary forms" in words:
                return "BSD-3-Clause" if "Neither the name" in words else "BSD-2-Clause"
    return "not said"


def table(names: list[str]) -> str:
    rows = []
    for name in names:
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        rows.append(f"| {name} | {package.version} | {licence(package)} |")
    return "\n".join(["| package | version | licence |", "|---|---|---|", *rows])


def main() -> None:
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [match[1] for line in lines if (match := re.match(r"([A-Za-z0-9_.-]+)==", line))]
    lead = "Of the versions in `constraints.txt`, as their metadata says (`make audit`)."
    text = f"# Licences\n\n{lead}\n\n{table(names)}\n"
    Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
