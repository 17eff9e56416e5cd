"""Tokenizers from every place give the same ids as what they come from."""

import json
import os
from pathlib import Path

import pytest
from corpora import document
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE

from attnres.data import load_tokenizer
from attnres.data.tokenizer import fingerprint, load_with_end, train_tokenizer, vocabulary_size
from attnres.errors import UserError

TRAINED, END = train_tokenizer(400, [document(i) for i in range(200)])

# Real tokenizers and texts, in tokenizers/gpt2, tokenizers/qwen2 and eval/wikitext2_test.raw of this folder.
DATA = Path(os.environ.get("ATTNRES_TEST_DATA", "absent"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="ATTNRES_TEST_DATA does not name a folder of real tokenizers")


@given(st.text())
def test_trained_bpe_gives_every_text_back(text: str):
    assert TRAINED.decode(TRAINED.encode(text).ids, skip_special_tokens=False) == text


def test_training_is_deterministic_and_keeps_to_the_vocabulary():
    again, _ = train_tokenizer(400, [document(i) for i in range(200)])
    assert again.to_str() == TRAINED.to_str()
    assert vocabulary_size(TRAINED) <= 400
    assert END == TRAINED.token_to_id("<|endoftext|>") == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}), ("config.json", {"model_type": "gpt2"})],
)
def test_two_files_with_a_config_and_one_file_give_the_same_ids(tmp_path: Path, name: str, fields: dict[str, str]):
    text = "The quick  brown fox's 1234\n\n\tünïcode 😀 number 17."
    TRAINED.model.save(str(tmp_path))
    TRAINED.save(str(tmp_path / "one.json"))
    (tmp_path / name).write_text(json.dumps(fields))
    pair, end = load_with_end(tmp_path)
    single = load_tokenizer(tmp_path / "one.json")
    assert pair.encode(text).ids == single.encode(text).ids == TRAINED.encode(text).ids
    assert end == END


def test_two_files_without_a_config_are_refused(tmp_path: Path):
    """They do not say how text was split: a tokenizer that guessed would give other tokens without a word."""
    TRAINED.model.save(str(tmp_path))
    with pytest.raises(UserError, match="do not say how text is split, and are neither GPT-2's nor Qwen2's: copy"):
        load_tokenizer(tmp_path)


def test_end_of_text_is_added_where_there_is_none(tmp_path: Path):
    Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    tokenizer, end = load_with_end(tmp_path)
    assert (tokenizer.encode("aba").ids, end, vocabulary_size(tokenizer)) == ([2, 0], 3, 4)


def test_configured_end_of_text_wins(tmp_path: Path):
    tokenizer = Tokenizer.from_str(TRAINED.to_str())
    tokenizer.add_special_tokens(["<done>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<done>"}}))
    assert load_with_end(tmp_path)[1] == tokenizer.token_to_id("<done>")


def test_of_a_hub_name_only_the_tokenizer_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def snapshot_download(name: str, allow_patterns: list[str]):
        if name != "some/model":
            raise OSError(f"{name} is not a valid model identifier.\nMore words")
        assert not any("safetensors" in pattern or pattern == "*.json" for pattern in allow_patterns)
        TRAINED.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    tokenizer, end = load_with_end("some/model")
    assert tokenizer.encode("the fox").ids == TRAINED.encode("the fox").ids
    assert end == END
    with pytest.raises(UserError, match=r"'gpt99' is no folder here and cannot be fetched .*is not a valid model"):
        load_tokenizer("gpt99")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("vocab.json", "{}", "holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt"),
        ("tokenizer_config.json", "[", "is not valid JSON"),
        ("tokenizer_config.json", "[]", r"is damaged \(is \[\]: expected keys and values\)"),
    ],
)
def test_folder_that_holds_no_tokenizer_is_refused(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_damaged_pair_is_refused(tmp_path: Path):
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UserError, match=r"vocab.json is not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be opened"):
        load_tokenizer(tmp_path)


def test_missing_path_is_refused_without_asking_the_hub(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist: give bpe:VOCABULARY"):
        load_tokenizer(tmp_path / "absent")


@needs_data
def test_gpt2_files_give_gpt2s_tokens():
    tokenizer, end = load_with_end(DATA / "tokenizers" / "gpt2")
    assert (end, vocabulary_size(tokenizer)) == (50256, 50257)
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    ids = [220, 825, 277, 7, 87, 2599, 198, 197, 7783, 2124, 338, 48609, 628]
    assert tokenizer.encode("  def f(x):\n\treturn x's 2024\n\n").ids == ids
    text = (DATA / "eval" / "wikitext2_test.raw").read_text("utf-8")
    rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
    assert len(tokenizer.encode("\n\n".join(rows))) == 287_644  # the published count


@needs_data
def test_qwen2_files_give_qwen2s_split():
    tokenizer, end = load_with_end(DATA / "tokenizers" / "qwen2")
    assert end == 151_643
    assert tokenizer.encode("Hello world 2024").ids == [9707, 1879, 220, 17, 15, 17, 19]


def test_a_tokenizer_differs_where_any_of_its_files_does(tmp_path):
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    before = fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("other weights")
    assert before and fingerprint(str(tmp_path)) == before
    for name in ("tekken.json", "added_tokens.json", "spiece.model"):
        (tmp_path / name).write_text(f"another {name}")
        assert fingerprint(str(tmp_path)) != before
        before = fingerprint(str(tmp_path))
