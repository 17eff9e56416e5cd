"""From text to a folder of tokens: whole, the same every time, or not there."""

import errno
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from corpora import document, write_jsonl
from launch import PATIENCE_S
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from attnres.data import Prepared, build, load_tokenizer, open_tokens, prepare
from attnres.data.encode import DocumentEncoder
from attnres.data.shards import SplitWriter
from attnres.data.sources import open_source
from attnres.errors import Interrupted, UserError


def texts(prepared: Prepared, split: str) -> list[str]:
    """The documents of a split, decoded."""
    tokens, tokenizer = prepared.tokens(split), load_tokenizer(prepared.path)
    starts = [*tokens.document_starts().tolist(), len(tokens)]
    assert all(tokens[end - 1 : end].item() == prepared.eos_id for end in starts[1:])
    return [tokenizer.decode(tokens[a : b - 1].tolist(), skip_special_tokens=False) for a, b in pairwise(starts)]


def test_every_document_is_in_one_split_whole_and_in_order(prepared: Prepared, corpus: Path):
    train, val = texts(prepared, "train"), texts(prepared, "val")
    everything = list(open_source(str(corpus)).read())
    assert [text for text in everything if text in set(train)] == train
    assert [text for text in everything if text in set(val)] == val
    assert Counter(train) + Counter(val) == Counter(everything)
    assert 10 <= len(val) <= 35  # 20 expected


def test_copies_of_a_document_never_stand_on_both_sides(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [document(i % 30) for i in range(90)])
    made = prepare(str(path), "bpe:300", held_out=0.3, progress=False)
    assert not set(texts(made, "train")) & set(texts(made, "val"))


def test_a_document_is_on_the_same_side_in_another_corpus(tmp_path: Path, prepared: Prepared):
    more = write_jsonl(tmp_path / "more.jsonl", [document(i) for i in range(150, -1, -1)])
    other = prepare(str(more), "bpe:300", held_out=0.2, progress=False)
    assert set(texts(prepared, "val")) <= set(texts(other, "val"))


@pytest.mark.parametrize("held_out", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_handful_of_documents_has_both_splits(tmp_path: Path, count: int, held_out: float):
    path = write_jsonl(tmp_path / "a.jsonl", [document(i) for i in range(count)])
    made = prepare(str(path), "bpe:300", held_out=held_out, progress=False)
    assert len(made.tokens("train")) and len(made.tokens("val"))


def test_plain_text_without_documents_has_both_splits(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(document(i) for i in range(100)))
    made = prepare(str(path), "bpe:300", progress=False)
    assert made.tokens("val").documents >= 1


def test_nothing_is_held_out_when_nothing_is_asked_for(corpus: Path):
    made = prepare(str(corpus), "bpe:300", held_out=0, progress=False)
    assert (made.tokens("train").documents, len(made.tokens("val"))) == (100, 0)
    assert len(made.tokens("val").document_starts()) == 0


def test_end_of_text_written_in_a_text_ends_no_document(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> still one", document(1), document(2)])
    made = prepare(str(path), "bpe:300", held_out=0, progress=False)
    tokens = made.tokens("train")
    assert int((tokens[:] == made.eos_id).sum()) == tokens.documents == 3
    assert texts(made, "train")[0] == "one <|endoftext|> still one"


def test_same_settings_return_what_is_there(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare(str(corpus), "bpe:300", progress=False)
    monkeypatch.setattr(build, "_build", None)  # would fail
    assert prepare(str(corpus), "bpe:300", progress=False) == first
    assert prepare(str(first.path), progress=False).header == first.header


def test_other_settings_or_other_text_make_another_folder(corpus: Path):
    first = prepare(str(corpus), "bpe:300", progress=False)
    second = prepare(str(corpus), "bpe:301", progress=False)
    third = prepare(str(corpus), "bpe:300", held_out=0.1, progress=False)
    write_jsonl(corpus, [document(i) for i in range(50)])
    fourth = prepare(str(corpus), "bpe:300", progress=False)
    assert len({made.path for made in (first, second, third, fourth)}) == 4


def test_preparing_twice_gives_the_same_bytes(corpus: Path, tmp_path: Path):
    one = prepare(str(corpus), "bpe:300", out=tmp_path / "one", progress=False)
    two = prepare(str(corpus), "bpe:300", out=tmp_path / "two", progress=False)
    names = sorted(file.name for file in one.path.iterdir())
    assert names == sorted(file.name for file in two.path.iterdir())
    assert all((one.path / name).read_bytes() == (two.path / name).read_bytes() for name in names)


def test_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "a.jsonl", ["w69999 w5", "w65536"])
    made = prepare(str(path), str(tmp_path / "tokenizer.json"), held_out=0, progress=False)
    assert made.header["dtype"] == "uint32"
    assert made.tokens("train")[:].tolist() == [69_999, 5, 70_000, 65_536, 70_000]


def test_the_tokenizer_of_the_data_adds_no_token_that_they_do_not_have(corpus: Path, tmp_path: Path):
    """As Llama 3's would: one in front of every text, after a ByteLevel that trims offsets."""
    prepared = prepare(corpus, tokenizer="bpe:300", out=tmp_path / "plain")
    own = load_tokenizer(prepared.path)
    own.add_special_tokens(["<s>"])
    front = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", own.token_to_id("<s>"))])
    own.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), front])
    (tmp_path / "own").mkdir()
    own.save(str(tmp_path / "own" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(config))
    assert own.encode("some text").ids[0] == own.token_to_id("<s>")
    again = load_tokenizer(prepare(corpus, tokenizer=str(tmp_path / "own"), out=tmp_path / "again").path)
    assert again.encode("some text").ids == own.encode("some text").ids[1:]
    assert list(again.encode("a b").offsets) == [(0, 1), (2, 3)], "what trims offsets stays"


def test_prepared_folder_opens_with_auto_tokenizer(prepared: Prepared):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared.path)
    assert tokenizer is not None
    assert tokenizer("the fox")["input_ids"] == load_tokenizer(prepared.path).encode("the fox").ids
    assert tokenizer.eos_token_id == prepared.eos_id


def test_progress_is_drawn_on_stderr_only(corpus: Path, capfd: pytest.CaptureFixture[str]):
    prepare(str(corpus), "bpe:300", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "tokenising" in err


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("failing", ["add", "close", "header"])
def test_full_disk_leaves_nothing_behind_and_earlier_data_intact(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    out = tmp_path / "out"
    earlier = prepare(str(corpus), "bpe:300", out=out / "earlier", progress=False)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "header":
        monkeypatch.setattr(build, "write_json", full)
    else:
        monkeypatch.setattr(SplitWriter, failing, full)
    with pytest.raises(UserError, match=r"cannot write .*new: No space left on device; .* make room"):
        prepare(str(corpus), "bpe:310", out=out / "new", progress=False)
    assert leftovers(out) == ["earlier"]
    monkeypatch.undo()
    assert open_tokens(earlier.path).documents == earlier.header["splits"]["train"]["documents"]
    assert prepare(str(corpus), "bpe:310", out=out / "new", progress=False).path == out / "new"


def test_interruption_leaves_nothing_behind(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DocumentEncoder, "encode", interrupt)
    with pytest.raises(Interrupted, match="nothing of it is left: give the same command again") as stopped:
        prepare(str(corpus), "bpe:300", out=tmp_path / "out" / "new", progress=False)
    assert stopped.value.code == 130
    assert leftovers(tmp_path / "out") == []


def test_what_a_killed_process_left_is_cleared(corpus: Path, tmp_path: Path):
    killed = tmp_path / "out" / ".new.99999999.new"
    killed.mkdir(parents=True)
    (killed / "train-00000.bin").write_bytes(b"123")
    prepare(str(corpus), "bpe:300", out=tmp_path / "out" / "new", progress=False)
    assert leftovers(tmp_path / "out") == ["new"]


def test_processes_that_prepare_at_once_agree(corpus: Path, own_cache: Path):
    program = (
        "import sys; from attnres.data import prepare\n"
        "made = prepare(sys.argv[1], 'bpe:300', progress=False); print(made.path, len(made.tokens()))"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(corpus)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {run.communicate(timeout=PATIENCE_S)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(outputs) == 1
    assert len(leftovers(own_cache / "data")) == 1


def test_folder_that_holds_something_else_is_left_alone(corpus: Path, tmp_path: Path, prepared: Prepared):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(
        UserError, match="is not empty and holds other files: expected an empty folder or prepared data"
    ):
        prepare(str(corpus), "bpe:300", out=tmp_path / "mine", progress=False)
    before = (prepared.path / "header.json").read_bytes()
    with pytest.raises(UserError, match="other settings"):
        prepare(str(corpus), "bpe:300", out=prepared.path, held_out=0.5, progress=False)
    assert (prepared.path / "header.json").read_bytes() == before


def test_prepared_folder_as_source_keeps_its_settings(prepared: Prepared, tmp_path: Path):
    made_with = {"tokenizer": "bpe:300", "held_out": 0.2}
    assert prepare(str(prepared.path), **made_with, progress=False).header == prepared.header
    assert prepare(str(prepared.path), str(prepared.path / "tokenizer.json")).header == prepared.header
    for name, value in {"tokenizer": "bpe:301", "held_out": 0.3, "limit": 100, "column": "body"}.items():
        with pytest.raises(UserError, match=f"was prepared with {name} .*: leave {name} out"):
            prepare(str(prepared.path), **{name: value}, progress=False)
    other = tmp_path / "tokenizer.json"
    other.write_text((prepared.path / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match="is not the tokenizer that made the tokens in"):
        prepare(str(prepared.path), str(other), progress=False)
    with pytest.raises(UserError, match="is prepared already"):
        prepare(str(prepared.path), out=tmp_path / "new", progress=False)


def test_empty_folder_is_taken(corpus: Path, tmp_path: Path):
    (tmp_path / "new").mkdir()
    assert prepare(str(corpus), "bpe:300", out=tmp_path / "new", progress=False).tokens().documents


def test_header_names_settings_and_counts(prepared: Prepared, corpus: Path):
    header = json.loads((prepared.path / "header.json").read_text())
    assert header["settings"]["source"] == str(corpus)
    train = header["splits"]["train"]
    assert train["tokens"] == sum(file["tokens"] for file in train["files"]) == len(prepared.tokens("train"))
    assert np.fromfile(prepared.path / "train-00000.bin", "<u2").max() == train["files"][0]["max_id"]


def test_importing_the_package_loads_no_heavy_library():
    program = (
        "import sys, attnres.data; from attnres.data import Batches\n"
        "print([name for name in ('tokenizers', 'transformers', 'pyarrow', 'rich', 'datasets') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
