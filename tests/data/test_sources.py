"""What each source reads, in which order."""

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from corpora import document, write_jsonl

from attnres.data import prepare
from attnres.data.readers import pieces
from attnres.data.sources import articles, open_source, stdlib_files
from attnres.errors import UserError


def read(spec: Path | str, **options) -> list[str]:
    return list(open_source(str(spec), **options).read())


def test_stdlib_is_library_source_without_tests_site_packages_and_idlelib():
    files = stdlib_files()
    assert files == stdlib_files()
    assert {"argparse.py", "ast.py", "tokenize.py"} <= {file.name for file in files}
    parts = {part for file in files for part in file.parts}
    assert not parts & {"site-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}


def test_every_stdlib_file_reads_as_one_document():
    documents = read("stdlib")
    assert len(stdlib_files()) * 0.9 < len(documents) <= len(stdlib_files())  # some are empty
    assert sum(map(len, documents)) > 5_000_000


def test_jsonl_rows_are_documents_in_order_without_blank_ones(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "", "  \n", "two"])
    assert read(path) == ["one", "two"]


def test_parquet_rows_are_documents_and_nulls_are_skipped(tmp_path: Path):
    texts = [document(i) for i in range(40)]
    pq.write_table(pa.table({"text": [*texts, None], "n": [0] * 41}), tmp_path / "a.parquet", row_group_size=7)
    assert read(tmp_path / "a.parquet") == texts


TEXTS = ["one", "", "  \n", 'two, "quoted"\nand a line', "x" * 200_000]
KEPT = [TEXTS[0], *TEXTS[3:]]


def as_csv(texts: list[str]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_text_is_read_compressed_or_not(tmp_path: Path, suffix: str, packed: str):
    rows = [{"id": i, "text": text} for i, text in enumerate([*TEXTS, None])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    content = {".jsonl": lines, ".json": json.dumps(rows, indent=1), ".csv": as_csv(TEXTS), ".txt": KEPT[1]}[suffix]
    path, data = tmp_path / f"a{suffix}{packed}", content.encode("utf-8-sig")
    if packed == ".gz":
        path.write_bytes(gzip.compress(data[:9]) + gzip.compress(data[9:]))  # files put together are one file
    elif packed == ".zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(data)
    else:
        path.write_bytes(data)
    expected = KEPT[1:2] if suffix == ".txt" else KEPT
    assert read(path) == read(tmp_path) == expected


WORDS = ["first", 'second, "quoted"\nand a line', None, "x" * 70_000, "caf\u00e9 \u2028"]


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
@pytest.mark.parametrize(
    "type",
    [
        *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
        *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()), pa.json_()),
        *(pa.run_end_encoded(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.binary())),
    ],
    ids=str,
)
def test_columns_of_every_arrow_type_of_text(tmp_path: Path, type: pa.DataType, kind: str):
    texts = pa.array([text for text in WORDS for _ in range(9)], pa.string())
    if pa.types.is_run_end_encoded(type):
        column = pc.run_end_encode(texts, run_end_type=type.run_end_type)
    elif pa.types.is_dictionary(type):
        column = texts.cast(type.value_type).dictionary_encode().cast(type)
    else:
        column = pa.ExtensionArray.from_storage(type, texts) if type == pa.json_() else texts.cast(type)
    table, path = pa.table({"id": range(len(texts)), "text": column}), tmp_path / f"a.{kind}".replace("stream", "arrow")
    if kind == "parquet":
        if pa.types.is_run_end_encoded(type):
            return  # there is no such Parquet
        pq.write_table(table, path, row_group_size=7)
    else:
        path = tmp_path / "a.arrow"
        with {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[kind](path, table.schema) as file:
            file.write_table(table, max_chunksize=11)
    assert read(path) == [text for text in texts.to_pylist() if text is not None]


def test_a_categorical_of_pandas_is_text_and_a_column_of_nulls_is_empty(tmp_path: Path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"text": pd.Categorical(["b", "a", "b"]), "n": [1, 2, 3], "none": [None] * 3})
    frame.to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["b", "a", "b"] and read(tmp_path / "a.parquet", column="none") == []
    with pytest.raises(UserError, match="no text column 'n': the ones with text are text"):
        read(tmp_path / "a.parquet", column="n")


def test_a_column_whose_name_has_a_dot_is_not_a_field_of_another(tmp_path: Path):
    pq.write_table(pa.table({"a": [{"b": "inner"}], "a.b": ["outer"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", column="a.b") == ["outer"]


@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.tex", "a.raw", "a.c", "a.jl", "a.R", "a.py", "A.TXT", "a.Md.GZ"])
def test_one_file_of_plain_text_or_code_is_cut_into_documents(tmp_path: Path, name: str):
    text = "".join(f"# {number}\n\n{document(number)}\n\n" for number in range(40))
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
    texts = read(tmp_path / name)
    assert "".join(texts) == text and len(texts) > 5


def test_a_json_file_of_lines_is_what_pandas_and_datasets_write(tmp_path: Path):
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(str(tmp_path / "a.json"))
    assert read(tmp_path / "a.json") == KEPT


def test_saved_data_sets_are_read_as_the_library_reads_them(tmp_path: Path):
    data = datasets.Dataset.from_dict({"text": [document(i) for i in range(50)], "n": range(50)})
    data.shuffle(seed=1).save_to_disk(tmp_path / "one", num_shards=3)
    expected = list(datasets.load_from_disk(str(tmp_path / "one"))["text"])
    assert read(tmp_path / "one") == expected and expected != data["text"][:]
    (arrow,) = (tmp_path / "one").glob("data-00001-*.arrow")
    assert read(arrow) == expected[17:34]
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema({"text": pa.large_string()})) as file:
        file.write(pa.record_batch({"text": pa.array([*TEXTS, None], pa.large_string())}))
    assert read(tmp_path / "a.arrow") == KEPT
    splits = {"test": data.select(range(5)), "train": data.select(range(5, 20))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "splits") == splits["train"]["text"][:]
    assert read(tmp_path / "splits" / "test") == splits["test"]["text"][:]
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(tmp_path / "no train")
    with pytest.raises(UserError, match=r"has the splits a, b: name one, for example .*no train/a"):
        read(tmp_path / "no train")


def test_a_data_set_in_memory_is_prepared_once(tmp_path: Path):
    rows = {"body": [document(i) for i in range(60)] + ["", None], "n": list(range(62))}
    data = datasets.Dataset.from_dict(rows)
    data_set = prepare(data, "bpe:300", held_out=0.2, column="body", progress=False)
    again = prepare(data.to_iterable_dataset(), "bpe:300", held_out=0.2, column="body", progress=False)
    other = prepare(data.select(range(59)), "bpe:300", held_out=0.2, column="body", progress=False)
    assert sum(split["documents"] for split in data_set.header["splits"].values()) == 60
    assert data_set.path != other.path and data_set.header["splits"] == again.header["splits"]
    assert data_set.header["source"].startswith("Dataset ")
    assert prepare(data, "bpe:300", held_out=0.2, column="body", progress=False).path == data_set.path
    with pytest.raises(UserError, match=r"row 0 of the Dataset has no text column 'text': .* body"):
        open_source(data)
    with pytest.raises(UserError, match=r"a DatasetDict was given: expected one data set, for example its split 'a'"):
        open_source(datasets.DatasetDict({"a": data}))
    with pytest.raises(UserError, match="can be gone through once"):
        open_source(row for row in data)


def test_another_column_can_be_chosen(tmp_path: Path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "x"}))
    assert read(tmp_path / "a.parquet", column="body") == read(tmp_path / "a.jsonl", column="body") == ["x"]


def test_folder_reads_files_of_all_kinds_by_name_and_leaves_out_hidden_ones(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / ".git" / "d.txt").write_text("d")
    (tmp_path / "notes.md").write_text("m")
    (tmp_path / "page.html").write_text("h")
    assert read(tmp_path) == ["a = 1", "b", "m", "c"]


def test_a_folder_of_text_may_be_called_as_a_build_of_python(tmp_path: Path):
    (tmp_path / "config-guides").mkdir()
    (tmp_path / "config-guides" / "a.txt").write_text("how to")
    assert list(open_source(tmp_path).read()) == ["how to"]


def test_python_file_is_decoded_as_its_coding_line_says(tmp_path: Path):
    (tmp_path / "a.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    assert "é" in read(tmp_path)[0]


@pytest.mark.parametrize("text", ["a b\nc\n\n" * 30_000, "no blank line\n" * 20_000, "x" * 300_000, "short"])
def test_plain_text_is_cut_into_pieces_that_join_to_it(tmp_path: Path, text: str):
    path = tmp_path / "a.txt"
    path.write_text(text)
    cut = list(pieces(path))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= 5 * 16 * 1024
    assert len(cut) >= 12 or text == "short"


def test_line_ends_are_kept(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo\r\n"]


def test_limit_cuts_at_that_many_characters(corpus: Path):
    assert "".join(read(corpus, limit=1000)) == "".join(read(corpus))[:1000]
    assert read(corpus, limit=10**9) == read(corpus)


def test_lone_surrogate_becomes_the_replacement_character(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b\\ud83d\\ude00"}\n')
    assert read(tmp_path / "a.jsonl") == ["a\ufffdb\U0001f600"]


def test_fingerprint_changes_with_the_file(corpus: Path):
    before = open_source(str(corpus)).fingerprint
    assert open_source(str(corpus)).fingerprint == before
    write_jsonl(corpus, ["other"])
    assert open_source(str(corpus)).fingerprint != before


def test_progress_size_is_about_the_text(corpus: Path, tmp_path: Path):
    texts = read(corpus)
    pq.write_table(pa.table({"text": texts, "other": texts}), tmp_path / "a.parquet", use_dictionary=False)
    size = open_source(str(tmp_path / "a.parquet")).size
    assert size == pytest.approx(sum(map(len, texts)), rel=0.1)


class Rows(list):
    """Rows that stream, of which nobody goes on."""

    def state_dict(self) -> dict:
        return {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """A library `datasets` that records what is opened and streams two documents."""
    opened: list[tuple] = []

    def load_dataset(name: str, config: str | None = None, *, split: str, streaming: bool, revision: str | None):
        opened.append((name, config, split, revision))
        if name == "absent":
            raise FileNotFoundError("Dataset 'absent' doesn't exist on the Hub")
        rows = [{"text": "one", "id": 1}, {"text": None, "id": 2}, {"text": " \n", "id": 2}, {"text": "two", "id": 3}]
        return Rows(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda name, timeout: SimpleNamespace(sha=f"commit of {name}"))
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    return opened


def test_hub_source_streams_the_named_configuration_and_split(hub: list[tuple]):
    assert read("hub:HuggingFaceFW/fineweb-edu:sample-10BT:train") == ["one", "two"]
    assert read("hub:fineweb-edu") == read("hub:HuggingFaceFW/fineweb-edu") == ["one", "two"]
    name = "HuggingFaceFW/fineweb-edu"
    assert hub == [(name, "sample-10BT", "train", f"commit of {name}")] * 3


def test_a_hub_data_set_that_changed_is_another_source(hub: list[tuple], monkeypatch: pytest.MonkeyPatch):
    before = open_source("hub:x/y").fingerprint
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda *args, **options: 1 / 0)  # no connection
    assert open_source("hub:x/y").fingerprint == before  # what was prepared is still taken
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda *args, **options: SimpleNamespace(sha="other"))
    assert open_source("hub:x/y").fingerprint != before


def test_a_source_of_blank_documents_holds_no_text(hub: list[tuple], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    blank = SimpleNamespace(load_dataset=lambda *args, **options: iter([{"text": ""}, {"text": " \n"}]))
    monkeypatch.setitem(sys.modules, "datasets", blank)
    with pytest.raises(UserError, match="hub:x/y' holds no text: every document in it is empty"):
        prepare("hub:x/y", "bpe:257", out=tmp_path / "out", progress=False)


def test_part_of_a_hub_source_is_streamed_once(hub: list[tuple], tmp_path: Path):
    data_set = prepare("hub:x/y", "bpe:257", out=tmp_path / "out", limit=100, progress=False)
    assert len(hub) == 1
    assert sum(split["documents"] for split in data_set.header["splits"].values()) == 2
    assert not (data_set.path / "documents.jsonl").exists()
    prepare("hub:x/y", "bpe:257", out=tmp_path / "whole", progress=False)
    assert len(hub) > 2  # all of a data set may be too large to keep twice


def test_hub_errors_are_sentences(hub: list[tuple], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"hub:absent' cannot be read from absent on the hub .*doesn't exist"):
        read("hub:absent")
    with pytest.raises(UserError, match=r"no text column 'body': the ones with text are text"):
        read("hub:x/y", column="body")
    with pytest.raises(UserError, match="is not hub:NAME"):
        read("hub:a:b:c:d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'attention-residuals\[data\]'"):
        read("hub:fineweb-edu")


def test_only_wikitext_itself_is_joined(hub: list[tuple], monkeypatch: pytest.MonkeyPatch):
    rows = SimpleNamespace(load_dataset=lambda *args, **options: iter([{"text": " = A = \n"}, {"text": " b \n"}]))
    monkeypatch.setitem(sys.modules, "datasets", rows)
    assert read("hub:wikitext") == read("hub:Salesforce/wikitext:wikitext-2-raw-v1") == [" = A = \n b \n"]
    assert read("hub:me/my-wikitext-notes") == [" = A = \n", " b \n"]


def test_wikitext_lines_are_joined_to_articles():
    lines = ["", " = One = \n", " text \n", " = = Part = = \n", " = Two = \n", " more \n"]
    assert list(articles(lines[1:])) == [" = One = \n text \n = = Part = = \n", " = Two = \n more \n"]
