"""Files of tokens: what is written is read back, and what has changed is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.data import Prepared, open_tokens
from attnres.data.shards import SplitWriter, Tokens
from attnres.errors import UserError

documents = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=30), min_size=1, max_size=20)


@given(texts=documents, file_tokens=st.integers(1, 40), data=st.data())
def test_any_slice_over_any_split_into_files_reads_what_was_written(tmp_path_factory, texts, file_tokens, data):
    folder: Path = tmp_path_factory.mktemp("shards")
    writer = SplitWriter(folder, "train", "uint16", file_tokens=file_tokens)
    for ids in texts:
        writer.add(np.array(ids))
    header = {"dtype": "uint16", "vocab_size": 1000, "eos_id": 0, "tokenizer_sha256": ""}
    tokens = Tokens(folder, "train", {**header, "splits": {"train": writer.close()}})
    flat = [id for ids in texts for id in ids]
    start, stop = data.draw(st.integers(0, len(flat))), data.draw(st.integers(0, len(flat) + 5))
    assert tokens[start:stop].tolist() == flat[start:stop]
    assert tokens.document_starts().tolist() == np.cumsum([0, *map(len, texts)])[:-1].tolist()


def test_missing_split_and_folder_are_refused(prepared: Prepared, tmp_path: Path):
    with pytest.raises(UserError, match=r"no split 'test': it has train, val"):
        open_tokens(prepared.path, "test")
    with pytest.raises(UserError, match="holds no prepared data"):
        open_tokens(tmp_path / "absent")


@pytest.mark.parametrize("name", ["train-00000.bin", "train-documents.bin"])
def test_truncated_or_missing_file_is_refused_even_unverified(prepared: Prepared, name: str):
    path = prepared.path / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"{name} has \d+ bytes, but its header says \d+"):
        open_tokens(prepared.path, verify=False)
    path.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        open_tokens(prepared.path, verify=False)


def test_header_that_disagrees_is_refused(prepared: Prepared, edit_header: Callable):
    edit_header(lambda header: header["splits"]["train"].update(tokens=17))
    with pytest.raises(UserError, match="disagrees with itself"):
        open_tokens(prepared.path)
    edit_header(lambda header: header.update(dtype="uint32"))
    with pytest.raises(UserError, match="but its header says"):
        open_tokens(prepared.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.update(version=99), "format version 99, expected 1"),
        (lambda header: header.pop("vocab_size"), r"is damaged \(vocab_size is None: expected it to be there\)"),
        (lambda header: header.update(eos_id=10**9), "its names or its eos_id"),
        (lambda header: header.update(eos_id=-1), "eos_id is -1: .*, 0 or more"),
        (lambda header: header.update(dtype="int8"), "is damaged"),
        (lambda header: header["splits"].update(train={}), "splits.train.documents is None: expected it to be there"),
        (lambda header: header["splits"]["train"].update(documents_file="../a.bin"), "its names or its eos_id"),
        (lambda header: header["splits"]["train"].update(documents_file=".."), "its names or its eos_id"),
        (
            lambda header: header["splits"]["train"].update(tokens=True),
            "tokens is True: expected a whole",
        ),
        (lambda header: header["splits"]["train"]["files"][0].update(name="/etc/passwd"), "its names or its eos_id"),
        (lambda header: header["splits"]["train"]["files"][0].update(name="a\\b"), "its names or its eos_id"),
        (lambda header: header["splits"]["train"]["files"][0].update(name=7), "name is 7: expected text"),
        (
            lambda header: header["splits"]["train"]["files"][0].update(tokens=0),
            "tokens is 0: .*, 1 or more",
        ),
        (
            lambda header: header["splits"]["train"]["files"][0].update(max_id="9"),
            "max_id is '9': expected",
        ),
        (
            lambda header: header["splits"]["train"]["files"][0].update(crc32=-1),
            "crc32 is -1: .*, 0 or more",
        ),
    ],
)
def test_damaged_header_is_refused(prepared: Prepared, edit_header: Callable, change: Callable, message: str):
    edit_header(change)
    with pytest.raises(UserError, match=message):
        open_tokens(prepared.path)


def test_header_that_is_not_json_is_refused(prepared: Prepared):
    (prepared.path / "header.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        open_tokens(prepared.path)


def overwrite(prepared: Prepared, index: int, id: int) -> None:
    path = prepared.path / "train-00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[index] = id
    ids.tofile(path)


def test_changed_token_is_refused(prepared: Prepared):
    overwrite(prepared, 5, int(prepared.tokens()[5:6].item()) ^ 1)
    open_tokens(prepared.path, verify=False)
    with pytest.raises(UserError, match="changed since it was written"):
        open_tokens(prepared.path)


@settings(max_examples=30)
@given(texts=documents, file_tokens=st.integers(1, 40), data=st.data())
def test_a_document_that_begins_elsewhere_is_told_by_the_end_before_it(tmp_path_factory, texts, file_tokens, data):
    folder: Path = tmp_path_factory.mktemp("shards")
    writer = SplitWriter(folder, "train", "uint16", file_tokens=file_tokens)
    for ids in texts:
        writer.add(np.array([*(id or 1 for id in ids), 0]))
    header = {"dtype": "uint16", "vocab_size": 1000, "eos_id": 0, "tokenizer_sha256": ""}
    tokens = Tokens(folder, "train", {**header, "splits": {"train": writer.close()}})
    assert tokens.starts_follow_ends()
    starts = tokens.document_starts().copy()
    which, other = data.draw(st.integers(0, len(starts) - 1)), data.draw(st.integers(0, len(tokens) + 3))
    if other not in starts:
        starts[which] = other
        starts.tofile(folder / "train-documents.bin")
        assert not tokens.starts_follow_ends()


def test_changed_documents_are_refused(prepared: Prepared):
    path = prepared.path / "train-documents.bin"
    starts = np.fromfile(path, "<u8")
    starts[3] += 1
    starts.tofile(path)
    open_tokens(prepared.path, verify=False)
    with pytest.raises(UserError, match=r"documents\.bin has changed since .* begin where none has ended"):
        open_tokens(prepared.path)


def test_token_outside_the_vocabulary_is_refused_when_opened_and_when_read(prepared: Prepared):
    overwrite(prepared, 5, 60_000)
    message = rf"token id 60000, outside its vocabulary of {prepared.vocab_size}"
    with pytest.raises(UserError, match=message):
        open_tokens(prepared.path)
    with pytest.raises(UserError, match=message):
        open_tokens(prepared.path, verify=False)[0:10]


def test_vocabulary_smaller_than_the_tokens_is_refused(prepared: Prepared, edit_header: Callable):
    edit_header(lambda header: header.update(vocab_size=50))
    with pytest.raises(UserError, match="outside its vocabulary of 50"):
        open_tokens(prepared.path, verify=False)


def test_tokenizer_that_did_not_make_the_tokens_is_refused(prepared: Prepared, tmp_path: Path):
    own = (prepared.path / "tokenizer.json").read_text()
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(own)
    assert open_tokens(prepared.path, tokenizer=model).documents
    (model / "tokenizer.json").write_text(own.replace("<|endoftext|>", "<|end|>"))
    with pytest.raises(UserError, match="is not the tokenizer that made the tokens in"):
        open_tokens(prepared.path, tokenizer=model)
    (prepared.path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not the tokenizer that made the tokens beside it"):
        open_tokens(prepared.path)
