"""Text that cannot be used is refused with a sentence, and nothing is left behind."""

import gzip
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import document, write_jsonl

from attnres.data import prepare
from attnres.data.sources import open_source
from attnres.errors import UserError


def refused(source: Path | str, message: str, own_cache: Path, **options) -> None:
    with pytest.raises(UserError, match=message) as raised:
        prepare(str(source), options.pop("tokenizer", "bpe:300"), progress=False, **options)
    assert "\n" not in str(raised.value)
    data = own_cache / "data"
    assert not data.exists() or all(path.suffix == ".lock" for path in data.iterdir())


def test_missing_file(tmp_path: Path, own_cache: Path):
    refused(tmp_path / "absent.txt", "does not exist: give stdlib, a file or folder", own_cache)


def test_unknown_kind_of_file(tmp_path: Path, own_cache: Path):
    (tmp_path / "a.docx").write_bytes(b"x")
    refused(
        tmp_path / "a.docx",
        r"ends in '.docx', expected text \(.txt, .md, .*\), code \(.py, .*\) or rows \(.jsonl, .*, .arrow\)",
        own_cache,
    )


def test_folder_without_text(tmp_path: Path, own_cache: Path):
    refused(tmp_path, "has no file that is text", own_cache)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path: Path, own_cache: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    refused(tmp_path / name, "holds no text", own_cache)


def test_empty_parquet(tmp_path: Path, own_cache: Path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "holds no text", own_cache)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.py"])
def test_text_that_is_not_utf8(tmp_path: Path, own_cache: Path, name: str):
    (tmp_path / name).write_bytes(b'{"text": "caf\xe9 au lait"}\n' * 100)
    refused(tmp_path / name, "not UTF-8|not Python source", own_cache)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.json", "a.csv", "a.py", "a.c", "a.txt.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "cp1252"])
def test_other_encodings_are_told_and_a_mark_is_no_text(tmp_path: Path, own_cache: Path, name: str, encoding: str):
    """What spreadsheets and editors on Windows write; a plain ASCII text in UTF-16 is also valid UTF-8."""
    rows = [document(i) + " caf\u00e9" * (encoding == "cp1252") for i in range(9)]
    content = {
        ".jsonl": "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows),
        ".json": json.dumps([{"text": row} for row in rows], ensure_ascii=False),
        ".csv": "text\n" + "".join(f'"{row}"\n' for row in rows),
    }.get(Path(name).suffix, "\n\n".join(rows))
    data = content.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if encoding == "utf-8-sig":
        texts = list(open_source(tmp_path / name).read())
        assert "".join(texts) in ("".join(rows), content)
    else:
        refused(tmp_path / name, "UTF-16|not UTF-8|not Python source", own_cache)


@pytest.mark.parametrize("name", ["a.csv", "a.arrow", "a.parquet"])
def test_two_columns_of_one_name(tmp_path: Path, own_cache: Path, name: str):
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    if name == "a.csv":
        (tmp_path / name).write_text("text,text\na,b\n")
    elif name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(tmp_path / name, table.schema) as file:
            file.write_table(table)
    refused(tmp_path / name, "has several columns 'text'", own_cache)


def test_bytes_that_are_no_text(tmp_path: Path, own_cache: Path):
    pq.write_table(pa.table({"text": [b"\xff\xd8\xff", b"text"]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "is not UTF-8 text", own_cache)


def test_bad_bytes_far_into_a_file_leave_nothing(tmp_path: Path, own_cache: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(("\n\n".join(map(document, range(1000)))).encode() + b"\xff\xfe")
    refused(path, "not UTF-8", own_cache)


def test_truncated_parquet(tmp_path: Path, own_cache: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [document(i) for i in range(50)]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, "is not a complete Parquet file", own_cache)
    path.write_bytes(b"")
    refused(path, "is not a complete Parquet file", own_cache)


@pytest.mark.parametrize(
    ("damage", "compression", "message"),
    [
        (slice(20, 2000), "snappy", "is not a complete Parquet file"),
        (slice(1000, 1100), "none", "is not UTF-8 text"),  # inside a document
    ],
)
def test_parquet_damaged_inside(tmp_path: Path, own_cache: Path, damage: slice, compression: str, message: str):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [document(i) for i in range(50)]})
    pq.write_table(table, path, compression=compression, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[damage] = random.Random(0).randbytes(damage.stop - damage.start)
    path.write_bytes(data)
    refused(path, message, own_cache)


def test_truncated_jsonl(tmp_path: Path, own_cache: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [document(i) for i in range(20)])
    path.write_bytes(path.read_bytes()[:-30])
    refused(path, "is truncated or not JSON Lines: line 20, its last, is not whole", own_cache)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_truncated_compressed_files(tmp_path: Path, own_cache: Path, packed: str):
    plain, path = write_jsonl(tmp_path / "a", [document(i) for i in range(200)]), tmp_path / f"a.jsonl{packed}"
    with pa.output_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}[packed]) as file:
        file.write(plain.read_bytes())
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, "is not whole, or not compressed as its name says", own_cache)
    path.write_bytes(plain.read_bytes())
    refused(path, "is not whole, or not compressed as its name says", own_cache)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('id,text\n1,"open', "is truncated or no CSV: line 2"),
        ("id,text\n1,a\n2\n", "line 3 has 1 fields and its header 2"),
        ("id,body\n1,a\n", "no text column 'text': the ones with text are id, body"),
        ("", "holds no text"),
    ],
)
def test_csv_that_is_none(tmp_path: Path, own_cache: Path, content: str, message: str):
    (tmp_path / "a.csv").write_text(content)
    refused(tmp_path / "a.csv", message, own_cache)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}', "is not valid JSON"),
        ('[{"text": "a"}, 2]', "entry 2 holds int, expected an object with 'text'"),
        ('{\n "text": "a"\n', "is not valid JSON"),
        ('{\n "body": "a"\n}', "no text column 'text': the ones with text are body"),
        ("", "holds no text"),
    ],
)
def test_json_that_is_none(tmp_path: Path, own_cache: Path, content: str, message: str):
    (tmp_path / "a.json").write_text(content)
    refused(tmp_path / "a.json", message, own_cache)


def test_damaged_arrow(tmp_path: Path, own_cache: Path):
    path = tmp_path / "a.arrow"
    for write in (pa.ipc.new_stream, pa.ipc.new_file):
        with write(path, pa.schema({"text": pa.string()})) as file:
            file.write(pa.record_batch({"text": [document(i) for i in range(50)]}))
        path.write_bytes(path.read_bytes()[:-400])
        refused(path, "is not a complete Arrow file", own_cache)
    path.write_bytes(b"")
    refused(path, "is not a complete Arrow file", own_cache)


def test_jsonl_of_something_else(tmp_path: Path, own_cache: Path):
    (tmp_path / "a.jsonl").write_text("[1, 2]\n")
    refused(tmp_path / "a.jsonl", "line 1 holds list, expected an object with 'text'", own_cache)


def test_wrong_column_names_the_ones_there_are(tmp_path: Path, own_cache: Path):
    pq.write_table(pa.table({"body": ["x"], "title": ["y"], "n": [1]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", r"no text column 'text': the ones with text are body, title", own_cache)
    refused(tmp_path / "a.parquet", r"no text column 'n'", own_cache, column="n")
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\n')
    refused(tmp_path / "a.jsonl", r"line 1 has no text column 'text': the ones with text are body", own_cache)


def test_one_document_cannot_be_split(tmp_path: Path, own_cache: Path):
    refused(
        write_jsonl(tmp_path / "a.jsonl", ["only"]),
        "is one document, or one over and over, so that none",
        own_cache,
    )
    refused(write_jsonl(tmp_path / "a.jsonl", ["same", "same"]), "is one document", own_cache, held_out=0.999)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"held_out": -0.1}, "held_out is -0.1"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": 2**63}, "limit is 9223372036854775808 characters, expected 1 to"),
        ({"tokenizer": "bpe:12"}, "number from 257"),
        ({"tokenizer": "bpe:many"}, "number from 257"),
        ({"tokenizer": "./nowhere"}, "tokenizer './nowhere' does not exist"),
    ],
)
def test_impossible_settings(corpus: Path, own_cache: Path, options: dict, message: str):
    refused(corpus, message, own_cache, **options)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(corpus: Path, own_cache: Path):
    corpus.chmod(0)
    refused(corpus, "cannot be read: Permission denied", own_cache)
