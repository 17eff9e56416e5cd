"""Which files of a folder are documents: every document that was written is read, and what is left out is named."""

import gzip
import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import document

from attnres.cli import main
from attnres.data import prepare
from attnres.data.sources import open_source
from attnres.errors import UserError

TEXTS = [document(i, words=8) for i in range(12)]


def write(path: Path, texts: list[str]) -> None:
    """Write documents in the form that the path's suffixes say, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, packed = (path.suffix, "") if path.suffix not in (".gz", ".zst") else (Path(path.stem).suffix, path.suffix)
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    if kind == ".parquet":
        return pq.write_table(pa.table({"text": texts}), path)
    content = {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        ".json": json.dumps(rows),
        ".csv": "text\n" + "".join(f'"{text}"\n' for text in texts),
    }.get(kind, "\n".join(texts))
    with pa.output_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}.get(packed)) as file:
        file.write(content.encode())


def read(spec: Path | str, **options) -> list[str]:
    return list(open_source(str(spec), **options).read())


def said(spec: Path | str) -> str:
    (line,) = open_source(str(spec)).files
    return line


SHARDS = ("a.json", "a.csv", "a.json.gz", "a.json.zst", "a.csv.gz", "a.csv.zst", "a.jsonl", "a.jsonl.gz", "a.parquet")


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("beside", ["urls.txt", "requirements-dev.txt", "LICENSE.txt", "README.md", "load.py"])
def test_a_shard_is_read_whatever_lies_beside_it(tmp_path: Path, shard: str, beside: str):
    write(tmp_path / "en" / shard, TEXTS)
    (tmp_path / beside).write_text("about the data")
    assert read(tmp_path) == TEXTS
    assert beside in said(tmp_path) and "1 file read" in said(tmp_path)
    assert "about the data" in read(tmp_path / beside)[0] + read(tmp_path / "*.*")[0], "what is named is read"


def test_text_beside_rows_is_a_document_too(tmp_path: Path):
    write(tmp_path / "web.json", TEXTS)
    (tmp_path / "Changes of heart.txt").write_text("a story")
    assert read(tmp_path) == ["a story", *TEXTS]
    assert said(tmp_path) == f"source {tmp_path}: 2 files read, none left out"


@pytest.mark.parametrize(
    "name",
    ["dataset_info.json", "config.json", "tokenizer_config.json", "model.safetensors.index.json", "state.json.gz"],
)
def test_descriptions_are_known_by_their_names_and_never_compressed(tmp_path: Path, name: str):
    write(tmp_path / "a.jsonl", TEXTS[:4])
    write(tmp_path / name, TEXTS[4:])
    assert read(tmp_path) == (TEXTS if name.endswith(".gz") else TEXTS[:4])
    assert read(tmp_path / name) == TEXTS[4:]


def test_a_program_is_read_without_the_json_and_csv_that_belong_to_it(tmp_path: Path):
    for number in range(4):
        (tmp_path / f"module{number}.py").write_text(f"x = {number}\n")
    (tmp_path / "README.md").write_text("# Program")
    (tmp_path / "settings.json").write_text('{\n "indent": 4\n}')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "table.csv").write_text("id,label\n1,a\n")
    assert read(tmp_path) == [f"x = {number}\n" for number in range(4)]
    assert all(name in said(tmp_path) for name in ("4 files read", "README.md", "settings.json' and 1 other"))
    assert set(read(tmp_path / "**" / "*.py")) == set(read(tmp_path))


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.json.gz", "a.jsonl"])
def test_shards_with_another_column_are_not_taken_for_descriptions(tmp_path: Path, name: str):
    (tmp_path / "load.py").write_text("import datasets")
    body = {"a.csv": "content,id\nx,1\n"}.get(name, '{"content": "x"}\n{"content": "y"}\n').encode()
    (tmp_path / name).write_bytes(gzip.compress(body) if name.endswith(".gz") else body)
    with pytest.raises(UserError, match=r"no text column 'text': the ones with text are content"):
        read(tmp_path)
    assert read(tmp_path, column="content")[0] == "x"


def test_a_folder_of_one_json_object_a_document(tmp_path: Path):
    for number, text in enumerate(TEXTS[:3]):
        (tmp_path / f"{number}.json").write_text(json.dumps({"text": text, "id": number}, indent=2 * (number > 0)))
    assert read(tmp_path) == TEXTS[:3]


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ("data/train-00000-of-00001.parquet", ["data/test-00000-of-00001.parquet", "data/validation-0.parquet"]),
        ("train.jsonl", ["test.jsonl", "dev.jsonl", "val.jsonl", "valid.jsonl"]),
        ("train/a.csv", ["test/a.csv", "Validation/a.csv"]),
        ("en/c4-train.00000-of-00002.json.gz", ["en/c4-validation.00000-of-00001.json.gz"]),
        ("wiki.train.raw", ["wiki.valid.raw", "wiki.test.raw"]),
        ("train/a.py", ["test/a.py"]),
        ("corpus.jsonl", ["corpus-test.jsonl", "eval set.jsonl"]),
    ],
)
def test_of_splits_the_one_to_train_on_is_read(tmp_path: Path, train: str, others: list[str]):
    write(tmp_path / train, TEXTS[:6])
    for number, name in enumerate(others):
        write(tmp_path / name, TEXTS[6 + number : 7 + number])
    assert "\n".join(read(tmp_path)) == "\n".join(TEXTS[:6])
    assert "test or validation split" in said(tmp_path) and "1 file read" in said(tmp_path)
    for number, name in enumerate(others):  # a file or a pattern that is named is read
        assert read(tmp_path / name) == read(f"{tmp_path}/{name[:-1]}*") == [TEXTS[6 + number]]


@pytest.mark.parametrize("name", ["test.jsonl", "validation/a.parquet", "wiki.test.raw"])
def test_a_folder_of_a_test_split_alone_is_refused_until_it_is_named(tmp_path: Path, name: str):
    write(tmp_path / name, ["text"])
    with pytest.raises(UserError, match=f"is called a test or validation split.*{name}"):
        read(tmp_path)
    assert read(tmp_path / name) == ["text"]
    if "/" in name:
        assert read((tmp_path / name).parent) == ["text"]


def test_titles_and_programs_are_no_splits(tmp_path: Path):
    (tmp_path / "A test of wills.txt").write_text("a")
    (tmp_path / "test_module.py").write_text("b")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "eval.py").write_text("c")
    assert read(tmp_path) == ["a", "b", "c"]


def test_the_splits_of_a_saved_data_set_are_named(tmp_path: Path):
    data = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path)
    assert "left out: 'test' (another split)" in said(tmp_path)


def test_the_hubs_cache_is_read_at_its_main_revision(tmp_path: Path):
    for revision in ("aaa", "bbb"):
        write(tmp_path / "snapshots" / revision / "train-0.parquet", [f"{revision} {text}" for text in TEXTS])
    (tmp_path / "refs").mkdir()
    with pytest.raises(UserError, match="has 2 revisions: give one"):
        read(tmp_path)
    (tmp_path / "refs" / "main").write_text("bbb")
    assert read(tmp_path) == read(tmp_path / "snapshots" / "bbb") == [f"bbb {text}" for text in TEXTS]


def test_what_is_hidden_linked_or_of_another_kind_is_said(tmp_path: Path):
    write(tmp_path / "data" / "A.TXT", ["text"])
    (tmp_path / "data" / ".git").mkdir()
    (tmp_path / "data" / "shard.jsonl.xz").write_bytes(b"x")
    write(tmp_path / "aside" / "b.txt", ["more"])
    os.symlink(tmp_path / "aside", tmp_path / "data" / "aside")
    assert read(tmp_path / "data") == ["text"]
    assert all(name in said(tmp_path / "data") for name in ("'.git' and 1 other", "'shard.jsonl.xz'"))
    assert read(tmp_path / "data" / "aside") == ["more"]


def test_a_pattern_reads_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("test.txt", "README.md", "b/c.txt", "b/d.png"):
        write(tmp_path / name, [name])
    monkeypatch.chdir(tmp_path)
    assert read("**/*.txt") == ["b/c.txt", "test.txt"]
    with pytest.raises(UserError, match="no file that matches"):
        read("*.jsonl")
    (tmp_path / "[1].txt").write_text("brackets")
    assert read("[1].txt") == ["brackets"]


def test_prepare_says_and_records_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "data" / "train.json.gz", TEXTS)
    write(tmp_path / "data" / "test.json.gz", TEXTS[:1])
    main(["prepare", "--source", str(tmp_path / "data"), "--tokenizer", "bpe:280", "--out", str(tmp_path / "out")])
    (line,) = json.loads((tmp_path / "out" / "header.json").read_text())["files"]
    assert line in capsys.readouterr().err.splitlines()
    assert "1 file read; left out: 'test.json.gz'" in line
    prepared = prepare(tmp_path / "data", "bpe:280", out=tmp_path / "out", progress=False)
    assert sum(split["documents"] for split in prepared.header["splits"].values()) == len(TEXTS)
