"""What a user can get wrong with data, sizes and folders is one sentence on stderr and exit status 2."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from attnres import cli
from attnres.training import TrainConfig, checkpoint, to_dict, train
from attnres.training.records import Metrics

Configure = Callable[..., TrainConfig]


def refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments])
    output = capsys.readouterr()
    assert left.value.code == 2 and output.out == "" and "Traceback" not in output.err
    assert output.err.startswith("attnres: error: ") and output.err.count("\n") == 1 and message in output.err


@pytest.fixture
def flags(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The command line of a small run with other values."""
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))

    def make(*more: str, **values: Any) -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(to_dict(configure(**values))))
        return ["train", "--config", str(path), "--no-progress", *more]

    return make


def not_utf8(path: Path) -> None:
    path.write_bytes(b"caf\xe9 " * 500)


def truncated_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": [f"document {i} " * 20 for i in range(50)]}), path)
    path.write_bytes(path.read_bytes()[:-20])


TEXTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty file": ("a.txt", lambda path: path.touch(), "holds no text"),
    "not UTF-8": ("a.txt", not_utf8, "is not UTF-8 text"),
    "wrong column": ("a.jsonl", lambda path: path.write_text('{"body": "x"}\n'), "no text column 'text'"),
    "truncated JSON Lines": ("a.jsonl", lambda path: path.write_text('{"text": "x'), "is truncated"),
    "truncated Parquet": ("a.parquet", truncated_parquet, "is not a complete Parquet file"),
    "shorter than a window": (
        "a.jsonl",
        lambda path: path.write_text('{"text": "x"}\n{"text": "y"}\n'),
        "one window of",
    ),
    "one document": ("a.jsonl", lambda path: path.write_text('{"text": "x"}\n'), "is one document"),
}


@pytest.mark.parametrize(("name", "write", "message"), TEXTS.values(), ids=TEXTS.keys())
def test_text(
    capsys: pytest.CaptureFixture[str],
    flags: Callable[..., list[str]],
    tmp_path: Path,
    name: str,
    write: Callable[[Path], object],
    message: str,
) -> None:
    write(tmp_path / name)
    refused(capsys, message, *flags("--source", str(tmp_path / name), "--tokenizer", "bpe:270"))
    assert not (tmp_path / "run").exists()


def change_a_token(folder: Path) -> None:
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "token changed": (change_a_token, "has changed since it was written"),
    "file missing": (lambda folder: (folder / "val-00000.bin").unlink(), "val-00000.bin is missing"),
    "another tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "is not the tokenizer that made the tokens",
    ),
    "header damaged": (lambda folder: (folder / "header.json").write_text("{"), "is damaged"),
}


@pytest.mark.parametrize(("harm", "message"), SHARDS.values(), ids=SHARDS.keys())
def test_prepared_data(
    capsys: pytest.CaptureFixture[str],
    flags: Callable[..., list[str]],
    corpus: Path,
    tmp_path: Path,
    harm: Callable[[Path], object],
    message: str,
) -> None:
    shutil.copytree(corpus, tmp_path / "tokens")
    harm(tmp_path / "tokens")
    refused(capsys, message, *flags("--source", str(tmp_path / "tokens")))


def test_settings_that_prepared_data_does_not_have(
    capsys: pytest.CaptureFixture[str], flags: Callable[..., list[str]], corpus: Path, tmp_path: Path
) -> None:
    refused(capsys, "was prepared with tokenizer 'bpe:280'", *flags("--tokenizer", "bpe:300"))
    (tmp_path / "tokenizer.json").write_text((corpus / "tokenizer.json").read_text() + " ")
    message = "is not the tokenizer that made the tokens in"
    refused(capsys, message, *flags("--tokenizer", str(tmp_path / "tokenizer.json")))


@pytest.mark.quick("values[0-46-8]-*")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 6, "accumulation": 4}, "does not divide into accumulation 4"),
        ({"model": {"num_blocks": 400}}, "num_blocks"),
        (
            {"model": {"residual": "block", "num_blocks": None, "settings": {"blok_size": 1}}},
            "did you mean 'block_size'",
        ),
        ({"seed": 5_000_000_000}, "it must be at most"),
        (
            {"model": {"size": {"family": "qwen3", "num_attention_heads": 3, "num_key_value_heads": 2}}},
            "num_key_value_heads",
        ),
        ({"model": {"size": {"family": "gpt2", "n_embd": 120_000, "n_layer": 400}}}, "weights of this size take 27"),
        ({"model": {"size": {"family": "qwen3", "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 3}}}, "head_dim"),
        ({"data": {"seq_len": 10**6}}, "one window of"),
        ({"data": {"limit": 5}}, "was prepared with limit None"),
    ],
)
def test_sizes(
    capsys: pytest.CaptureFixture[str],
    flags: Callable[..., list[str]],
    tmp_path: Path,
    values: dict[str, Any],
    message: str,
) -> None:
    refused(capsys, message, *flags(**values))
    assert not (tmp_path / "run").exists()


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.long
def test_folders(
    capsys: pytest.CaptureFixture[str],
    configure: Configure,
    flags: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = tmp_path / "run" / "checkpoint" / "state.json"
    with monkeypatch.context() as patch:  # the second checkpoint finds the disk full
        save = checkpoint.save_model
        patch.setattr(checkpoint, "save_model", lambda model, to: full() if state.exists() else save(model, to))
        refused(capsys, "No space left on device; what was there before is intact", *flags())
    refused(capsys, "holds an unfinished run: continue it with --resume", *flags())
    refused(capsys, "optim.lr is 0.5 here, 0.01 there", *flags("--resume", "--lr", "0.5"))
    refused(capsys, "is not empty and holds other files", *flags("--out", str(tmp_path)))

    whole = state.read_text()
    state.write_text(json.dumps({**json.loads(whole), "progress": {}}))
    refused(capsys, "cannot go on from", *flags("--resume"))
    state.write_text(whole[:-20])
    refused(capsys, "is not valid JSON", *flags("--resume"))
    state.write_text(whole)
    assert train(configure(resume=True), progress=False)["step"] == 8


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_while_metrics_are_written(
    capsys: pytest.CaptureFixture[str], flags: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_full_disk(*given: Any) -> Metrics:
        metrics = Metrics(*given)
        metrics.file.close()
        metrics.path.unlink()
        metrics.path.symlink_to("/dev/full")  # still the file of that name: one that is taken away is another story
        metrics.file = open(metrics.path, "a", encoding="utf-8")  # noqa: SIM115
        return metrics

    monkeypatch.setattr("attnres.training.run_folder.Metrics", on_a_full_disk)
    refused(capsys, "metrics.jsonl: No space left on device; the last checkpoint is intact", *flags())
