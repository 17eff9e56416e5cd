"""What is read of the hub is kept: a preparation that was cut short goes on from there."""

import json
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from corpora import document, write_jsonl

from attnres.data import encode, prepare, sources
from attnres.data.sources import open_source
from attnres.errors import UserError

TEXTS = [document(i) for i in range(400)]
TEXTS[30] = " " * 50
LIMIT = sum(map(len, TEXTS)) - 100
KILLED = """
import sys, time
from attnres.data import encode, prepare, sources
encode.AHEAD = 2000
plain = sources.field_of
sources.field_of = lambda *row: time.sleep(0.01) or plain(*row)
prepare(sys.argv[1], "bpe:300", out=sys.argv[2], limit=int(sys.argv[3]), progress=False)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """A data set by the path that a name on the hub takes, of four Parquet files."""
    for part in range(4):
        rows = datasets.Dataset.from_dict({"text": TEXTS[100 * part : 100 * part + 100]})
        rows.to_parquet(str(tmp_path / "rows" / f"{part}.parquet"), batch_size=10)
    return f"hub:{tmp_path / 'rows'}"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rows that are read."""
    read: list[str] = []
    plain = sources.field_of

    def counted(*row):
        for text in plain(*row):
            read.append(text)
            yield text

    monkeypatch.setattr(sources, "field_of", counted)
    monkeypatch.setattr(encode, "AHEAD", 2000)
    return read


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "header.json"}


def expected(tmp_path: Path) -> dict[str, bytes]:
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    return files(prepare(str(path), "bpe:300", out=tmp_path / "expected", limit=LIMIT, progress=False).path)


@pytest.mark.long
def test_a_killed_preparation_goes_on_where_it_read_the_hub(spec: str, tmp_path: Path, rows: list[str]):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(script), spec, str(tmp_path / "out"), str(LIMIT)]) as killed:
        while killed.poll() is None and not list(tmp_path.glob(".out.*.parts/read.json")):
            time.sleep(0.01)
        time.sleep(0.5)
        killed.kill()
    (folder,) = tmp_path.glob(".out.*.parts")
    before = json.loads((folder / "read.json").read_text())
    prepared = prepare(spec, "bpe:300", out=tmp_path / "out", limit=LIMIT, progress=False)
    assert before["text"] > 0 and len(rows) <= 400 - before["text"] // max(map(len, TEXTS))
    assert not folder.exists()
    assert files(prepared.path) == expected(tmp_path)


def test_a_lost_connection_leaves_what_was_read(spec: str, tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch):
    plain = sources.streamed_rows

    def lost(*place):
        given, where = plain(*place)

        def until():
            for number, row in enumerate(given):
                if number == 150:
                    raise UserError("the connection was lost")
                yield row

        return until(), where

    monkeypatch.setattr(sources, "streamed_rows", lost)
    for _ in range(2):  # 150 rows each time
        with pytest.raises(UserError, match="the connection was lost"):
            prepare(spec, "bpe:300", out=tmp_path / "out", limit=LIMIT, progress=False)
        assert not (tmp_path / "out").exists()
        (folder,) = tmp_path.glob(".out.*.parts")
        with (folder / "documents.jsonl").open("ab") as file:  # as when it was killed in the middle of a line
            file.write(b'"left beh')
    prepared = prepare(spec, "bpe:300", out=tmp_path / "out", limit=LIMIT, progress=False)
    assert len(rows) < 500  # of 400; some are read twice
    assert not folder.exists()
    assert files(prepared.path) == expected(tmp_path)


def test_a_limit_goes_on_where_it_was_left(spec: str):
    whole = list(open_source(spec, limit=LIMIT).read())
    source = open_source(spec, limit=LIMIT)
    assert source.read_from is not None
    texts, where = source.read_from(None)
    first = [next(texts) for _ in range(40)]
    again, after = source.read_from(where())
    assert [*first, *again] == whole and after()["left"] == 0
    assert sum(map(len, whole)) == LIMIT - 50  # what is blank counts and is left out


def test_a_note_that_is_damaged_is_a_sentence(spec: str, tmp_path: Path):
    folder = tmp_path / "spooled"
    encode.spooled(open_source(spec, limit=LIMIT), folder)
    (folder / "read.json").write_text('{"size": -1}')
    with pytest.raises(UserError, match=r"read\.json is damaged .*: remove"):
        encode.spooled(open_source(spec, limit=LIMIT), folder)
