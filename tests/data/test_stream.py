"""Training on a source that is read as far as steps ask for it: the tokens are those of all of it, read at once."""

import hashlib
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from corpora import document, write_jsonl
from tiny import NARROW

from attnres import train
from attnres.data import prepare, sources, stream
from attnres.data.stream import StreamedBatches, StreamedTokens
from attnres.data.tokenizer import load_tokenizer
from attnres.errors import UserError
from attnres.training import from_dict
from attnres.training.config import DataConfig
from attnres.training.data import prepare_from

LIMIT, SHARE, SEQ_LEN = 8000, 0.2, 16
TEXTS = [document(i) for i in range(100)]
TEXTS[60] = ""
TEXTS[70] = TEXTS[3]


def is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < SHARE * 2**64


@pytest.fixture(params=["file", "hub"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of rows; and a data set by the path that a name on the hub takes, of two Parquet files."""
    monkeypatch.setattr(stream, "AHEAD", 4000)
    if request.param == "file":
        return str(write_jsonl(tmp_path / "rows.jsonl", TEXTS))
    for part in range(2):
        rows = datasets.Dataset.from_dict({"text": TEXTS[part * 50 : part * 50 + 50]})
        rows.to_parquet(str(tmp_path / "rows" / f"{part}.parquet"), batch_size=10)
    return f"hub:{tmp_path / 'rows'}"


def opened(spec: str) -> StreamedTokens:
    head = prepare(spec, "bpe:300", held_out=SHARE, limit=LIMIT, progress=False)
    return StreamedTokens(head, spec, column="text", held_out=SHARE, limit=LIMIT)


def whole(tokens: StreamedTokens) -> np.ndarray:
    """The head's tokens, and those of each document after it that is not held out, one by one."""
    model, ids = load_tokenizer(tokens.folder), [tokens.head[0 : len(tokens.head)]]
    documents = sum(split["documents"] for split in tokens.prepared.header["splits"].values())
    for text in [text for text in TEXTS if text][documents:]:
        if not is_held_out(text):
            ids.append(np.array([*model.encode(text, add_special_tokens=False).ids, tokens.prepared.eos_id]))
    return np.concatenate(ids)


def test_a_source_is_read_as_far_as_it_is_asked_for(spec: str, monkeypatch: pytest.MonkeyPatch):
    tokens = opened(spec)
    expected, first = whole(tokens), len(tokens.head)
    assert np.array_equal(tokens[first - 5 : first + 5], expected[first - 5 : first + 5])
    position = tokens.position
    assert position and 20 < position["documents"] < 60 and not position["ended"]
    assert (position["place"] is not None) == spec.startswith("hub:")
    # Another process goes on where this one stopped, whatever a killed one left at the end of the file.
    with open(tokens.kept / "train.bin", "ab") as file:
        file.write(b"left behind")
    rows: list[int] = []
    plain = sources.field_of
    monkeypatch.setattr(sources, "field_of", lambda *row: rows.append(1) or plain(*row))
    again = opened(spec)
    half = (first + len(expected)) // 2
    assert np.array_equal(again[0:half], expected[:half])
    assert spec.startswith("hub:") == (0 < len(rows) < 50)  # a data set of the hub is not read from its start
    assert np.array_equal(tokens[half : half + 40], expected[half : half + 40])
    assert tokens.reach(10**9) == len(expected) and np.array_equal(tokens[0 : len(expected)], expected)
    assert again.reach(10**9) == len(expected) == len(opened(spec)[0 : 10**9])


def test_held_out_documents_are_those_of_the_head_and_none_is_trained_on(spec: str):
    tokens = opened(spec)
    model, held = load_tokenizer(tokens.folder), tokens.prepared.tokens("val")
    text = model.decode(tokens[0 : tokens.reach(10**9)].tolist(), skip_special_tokens=True)
    numbers = {f"number {i}." for i, one in enumerate(TEXTS) if one and is_held_out(one)}
    inside = model.decode(held[0 : len(held)].tolist(), skip_special_tokens=True)
    assert any(number in inside for number in numbers) and not any(f" {number}" in text for number in numbers)


def test_batches_are_the_windows_in_order_and_begin_again_at_the_end(spec: str):
    tokens = opened(spec)
    expected = whole(tokens)
    batches = StreamedBatches(tokens, seq_len=SEQ_LEN, batch_size=3)
    windows = (len(expected) - 1) // SEQ_LEN
    for step in (0, windows // 3 - 1, windows // 3, windows):
        inputs, targets = batches.at(step)
        for row, window in enumerate(range(3 * step, 3 * step + 3)):
            start = window % windows * SEQ_LEN
            assert inputs[row].tolist() == expected[start : start + SEQ_LEN].tolist()
            assert targets[row].tolist() == expected[start + 1 : start + SEQ_LEN + 1].tolist()
    halves = [batches.at(1, rank=rank, world_size=3)[0] for rank in range(3)]
    assert [half.tolist() for half in halves] == [[row] for row in batches.at(1)[0].tolist()]


@pytest.mark.long
def test_a_streamed_run_goes_on_bit_for_bit(spec: str, tmp_path: Path, own_cache: Path):
    data = {"source": spec, "tokenizer": "bpe:300", "stream": True, "limit": LIMIT, "held_out": SHARE}
    values = {
        "model": {"size": NARROW, "num_blocks": 2},
        "data": {**data, "seq_len": SEQ_LEN, "val_windows": 4},
        "steps": 60,
        "batch_size": 4,
        "dtype": "fp32",
        "device": "cpu",
        "val_every": 60,
        "depth_every": 0,
        "save_every": 30,
        "keep_at": (30,),
    }
    expected = train(from_dict({**values, "out": str(tmp_path / "one")}), progress=False)
    assert list((own_cache / "streams").glob("*/position.json"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("summary.json", "checkpoint", "model"):
        path = tmp_path / "two" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    shutil.copytree(tmp_path / "two" / "kept" / "000030", tmp_path / "two" / "checkpoint")
    shutil.rmtree(own_cache / "streams")  # as on another machine
    again = train(from_dict({**values, "out": str(tmp_path / "two"), "resume": True}), progress=False)
    assert again["val_loss"] == expected["val_loss"] and again["step"] == 60
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("one", "two")]
    assert weights[0] == weights[1]


def test_what_cannot_be_streamed_is_a_sentence(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    head = prepare(str(path), "bpe:300", out=tmp_path / "prepared", held_out=SHARE, progress=False)
    with pytest.raises(UserError, match="is prepared already, so nothing of it can be streamed"):
        StreamedTokens(head, str(head.path), column="text", held_out=SHARE, limit=LIMIT)
    with pytest.raises(UserError, match="is prepared already, so nothing of it can be streamed"):
        prepare_from(DataConfig(source=str(head.path), stream=True))
    tokens = opened(str(path))
    tokens.reach(10**6)
    (tokens.kept / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train.bin is shorter than .*position.json says: remove"):
        opened(str(path)).reach(10**6)


def test_of_rows_that_are_streamed_no_more_is_read_than_the_limit_asks_for(tmp_path: Path):
    given: list[int] = []

    def rows():
        for number, text in enumerate(TEXTS):
            given.append(number)
            yield {"text": text}

    made = prepare(datasets.IterableDataset.from_generator(rows), "bpe:300", held_out=SHARE, limit=LIMIT)
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    assert made.header["splits"] == prepare(str(path), "bpe:300", held_out=SHARE, limit=LIMIT).header["splits"]
    assert max(given) < 50
