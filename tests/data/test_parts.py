"""Several processes prepare what one prepares, byte for byte, and go on from what a killed one left."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from corpora import document, write_jsonl

from attnres.cli import main
from attnres.data import encode, prepare
from attnres.errors import UserError

KILLED = """
import itertools, signal, sys
from attnres.data import encode, prepare
encode.PART = 3000
result, count = encode._result, itertools.count(1)
def five(*part):
    if next(count) > 5:
        print("five", flush=True)
        signal.pause()
    return result(*part)
encode._result = five
if __name__ == "__main__":
    prepare(sys.argv[1], "bpe:300", out=sys.argv[2], workers=2, progress=False)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """900 documents, among them empty ones and one longer than a part."""
    texts = [document(i) for i in range(900)]
    texts[3], texts[7] = "", document(7, 2000)
    return write_jsonl(tmp_path / "large.jsonl", texts)


def test_any_number_of_processes_makes_the_same_files(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encode, "PART", 3000)
    one = prepare(str(corpus), "bpe:300", out=tmp_path / "one", progress=False)
    flags = {"source": corpus, "tokenizer": "bpe:300", "out": tmp_path / "two", "workers": 2}
    main(["prepare", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])
    assert files(tmp_path / "two") == files(one.path)
    assert not list(tmp_path.glob(".two.*.parts"))


@pytest.mark.long
def test_a_killed_preparation_goes_on_from_its_parts(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(large), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "five\n"
        workers = Path(f"/proc/{killed.pid}/task/{killed.pid}/children")
        ours = [int(word) for word in workers.read_text().split()] if workers.exists() else []
        killed.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/task").exists() for pid in ours) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}/task").exists() for pid in ours)
    (folder,) = tmp_path.glob(".out.*.parts")
    left = sorted(folder.glob("*.npz"))
    assert len(left) >= 5 and not (tmp_path / "out").exists()
    damaged, *kept = left
    damaged.write_bytes(damaged.read_bytes()[:-100])

    monkeypatch.setattr(encode, "PART", 3000)
    submitted = []
    submit = ProcessPoolExecutor.submit
    monkeypatch.setattr(
        ProcessPoolExecutor, "submit", lambda pool, make, work: submitted.append(work.file) or submit(pool, make, work)
    )
    two = prepare(str(large), "bpe:300", out=tmp_path / "out", workers=2, progress=False)
    assert damaged in submitted and not set(kept) & set(submitted) and len(submitted) > 50
    assert not folder.exists()
    folder.mkdir()  # killed once more, after the data had been put in their place
    (tmp_path / ".out.lock").touch()
    prepare(str(large), "bpe:300", out=tmp_path / "out", workers=2, progress=False)
    assert not folder.exists() and not (tmp_path / ".out.lock").exists()
    one = prepare(str(large), "bpe:300", out=tmp_path / "one", progress=False)
    assert files(two.path) == files(one.path)
    assert json.loads((one.path / "header.json").read_text())["splits"]["train"]["documents"] > 800


def test_a_text_that_the_tokenizer_cannot_read_is_said_and_no_process_is_none(corpus: Path, tmp_path: Path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="[none]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizer cannot read the text"):
        prepare(str(corpus), str(tmp_path / "tokenizer.json"), held_out=0, workers=2, progress=False)
    for workers in (0, 10**30):
        with pytest.raises(UserError, match=f"workers is {workers}, expected a number of processes from 1 to 1024"):
            prepare(str(corpus), "bpe:300", workers=workers, progress=False)
