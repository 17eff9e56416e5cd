"""What each source reads, in which order."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import document, write_jsonl

from attnres.data import prepare
from attnres.data.hub import articles
from attnres.data.readers import pieces
from attnres.data.sources import open_source, stdlib_files
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
    assert read(tmp_path) == ["a = 1", "b", "c"]


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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """A library `datasets` that records what is opened and streams two documents."""
    opened: list[tuple] = []

    def load_dataset(name: str, config: str | None = None, *, split: str, streaming: bool, revision: str | None):
        opened.append((name, config, split, revision))
        if name == "absent":
            raise FileNotFoundError("Dataset 'absent' doesn't exist on the Hub")
        rows = [{"text": "one", "id": 1}, {"text": None, "id": 2}, {"text": " \n", "id": 2}, {"text": "two", "id": 3}]
        return iter(rows)

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
    made = prepare("hub:x/y", "bpe:257", out=tmp_path / "out", limit=100, progress=False)
    assert len(hub) == 1
    assert sum(split["documents"] for split in made.header["splits"].values()) == 2
    assert not (made.path / "documents.jsonl").exists()
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
    with pytest.raises(UserError, match=r"pip install 'attnres\[data\]'"):
        read("hub:fineweb-edu")


def test_only_wikitext_itself_is_joined(hub: list[tuple], monkeypatch: pytest.MonkeyPatch):
    rows = SimpleNamespace(load_dataset=lambda *args, **options: iter([{"text": " = A = \n"}, {"text": " b \n"}]))
    monkeypatch.setitem(sys.modules, "datasets", rows)
    assert read("hub:wikitext") == read("hub:Salesforce/wikitext:wikitext-2-raw-v1") == [" = A = \n b \n"]
    assert read("hub:me/my-wikitext-notes") == [" = A = \n", " b \n"]


def test_wikitext_lines_are_joined_to_articles():
    lines = ["", " = One = \n", " text \n", " = = Part = = \n", " = Two = \n", " more \n"]
    assert list(articles(lines[1:])) == [" = One = \n text \n = = Part = = \n", " = Two = \n more \n"]
