"""Small corpora, and a cache of the test's own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import document, write_jsonl

from attnres.data import Prepared, prepare


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """100 documents as JSON Lines."""
    return write_jsonl(tmp_path / "corpus.jsonl", [document(i) for i in range(100)])


@pytest.fixture
def prepared(corpus: Path, tmp_path: Path) -> Prepared:
    return prepare(str(corpus), "bpe:300", out=tmp_path / "prepared", held_out=0.2, progress=False)


@pytest.fixture
def edit_header(prepared: Prepared) -> Callable[[Callable[[dict], object]], None]:
    """Changes the header of `prepared` on the disk."""

    def edit(change: Callable[[dict], object]) -> None:
        path = prepared.path / "header.json"
        header = json.loads(path.read_text())
        change(header)
        path.write_text(json.dumps(header))

    return edit
