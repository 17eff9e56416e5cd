"""Build the larger training text from wheels and books that recipes/mixture.txt names by their hashes.

python experiments/mixture.py --wheels WHEELS --books BOOKS --out MIXTURE
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import tyro

from attnres.cli import carry_out
from attnres.errors import UserError
from attnres.files import write_text

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "mixture.txt"
SHORTEST, LONGEST = 200, 1_000_000
"""Characters of a source file that is taken: shorter ones say nothing, longer ones are tables."""


class Recipe(NamedTuple):
    """SHA-256 of each wheel's file, by package and version, and of each file of books, by name."""

    wheels: dict[str, str]
    books: dict[str, str]


def recipe(text: str) -> Recipe:
    """Read requirements with hashes, `NAME==VERSION --hash=sha256:HASH`, and comments `# books: FILE HASH`."""
    wheels = dict(re.findall(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", text, flags=re.MULTILINE))
    return Recipe(wheels, dict(re.findall(r"^# books: (\S+) ([0-9a-f]{64})$", text, flags=re.MULTILINE)))


def found(folder: Path, hashes: dict[str, str]) -> dict[str, Path]:
    """Return the file of each name by its hash. Raises UserError where one is missing."""
    files = {_sha256(path): path for path in sorted(folder.iterdir()) if path.is_file()}
    if missing := [name for name, digest in hashes.items() if digest not in files]:
        raise UserError(f"{folder} has no file with the hash of {', '.join(missing)}: expected those of {RECIPE.name}")
    return {name: files[digest] for name, digest in hashes.items()}


def sources(wheels: list[Path]) -> dict[str, str]:
    """Return the Python files of wheels, each distinct text once, in the order of their hashes."""
    texts = {}
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if not name.endswith(".py"):
                    continue
                try:
                    text = archive.read(name).decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if SHORTEST <= len(text) <= LONGEST:
                    texts.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
    return dict(sorted(texts.items()))


def build(wheels: Path, books: Path, out: Path) -> None:
    """Write OUT/python.jsonl and links to the books, and print the digest of the documents.

    Args:
        wheels: the folder that pip download wrote.
        books: the folder with the files of books.
        out: a new folder, to be given as --source.
    """
    if out.exists():
        raise UserError(f"{out} exists: give a new folder")
    named = recipe(RECIPE.read_text("utf-8"))
    texts, shards = sources([*found(wheels, named.wheels).values()]), found(books, named.books)
    out.mkdir(parents=True)
    write_text(out / "python.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
    for name, path in shards.items():
        (out / name).symlink_to(path.resolve())
    digest = hashlib.sha256("\n".join([*texts, *named.books.values()]).encode()).hexdigest()
    size = sum(map(len, texts.values())) / 1e6
    print(f"{len(texts):,} source files, {size:.1f} M characters; {len(shards)} files of books; digest {digest}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(build))
