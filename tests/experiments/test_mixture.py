"""The larger text is built from the files that its recipe names by hash, and from no others."""

import hashlib
import json
import zipfile

import mixture
import pytest

from attnres.errors import UserError


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path.read_bytes()


def test_sources_of_named_wheels_are_taken_once_and_in_the_same_order(tmp_path, monkeypatch, capsys):
    a, b, short = "x = 1\n" * 60, "y = 'ä'\n" * 60, "z = 2\n"
    wheels, books = tmp_path / "wheels", tmp_path / "books"
    wheels.mkdir(), books.mkdir()
    first = wheel(wheels / "one.whl", {"one/a.py": a, "one/b.py": b, "one/short.py": short, "one/data.txt": a * 2})
    second = wheel(wheels / "two.whl", {"two/again.py": a})
    (books / "some.parquet").write_bytes(b"books")
    named = {hashlib.sha256(data).hexdigest() for data in (first, second)}
    lines = [f"package{place}==1.{place} --hash=sha256:{digest}" for place, digest in enumerate(sorted(named))]
    lines.append(f"# books: some.parquet {hashlib.sha256(b'books').hexdigest()}")
    monkeypatch.setattr(mixture, "RECIPE", tmp_path / "mixture.txt")
    mixture.RECIPE.write_text("\n".join(lines) + "\n")

    mixture.build(wheels, books, tmp_path / "out")
    written = [json.loads(line)["text"] for line in (tmp_path / "out" / "python.jsonl").read_text("utf-8").splitlines()]
    assert written == sorted([a, b], key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    assert (tmp_path / "out" / "some.parquet").read_bytes() == b"books"
    said = capsys.readouterr().out
    assert "2 source files" in said and "digest" in said

    wheel(wheels / "two.whl", {"two/again.py": a + "changed = 1\n"})
    with pytest.raises(UserError, match=r"package[01]==1\.[01]"):
        mixture.build(wheels, books, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="exists: give a new folder"):
        mixture.build(wheels, books, tmp_path / "out")


def test_the_recipe_names_packages_and_books_by_hash():
    named = mixture.recipe(mixture.RECIPE.read_text("utf-8"))
    lines = [line for line in mixture.RECIPE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert len(named.wheels) == len(lines) >= 10 and len(named.books) == 3
