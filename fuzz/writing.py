"""The commands that write, and what each of them writes where nothing stops it."""

import hashlib
import os
import shutil
import time
from pathlib import Path

from fuzz.changes import Changes
from fuzz.forked import started, wait
from fuzz.material import Material

RESUMED = ("train", "prepare", "prepare in parts", "convert")
"""Whose result is that of an uninterrupted run to the byte, after whatever happened to it."""
CHILDREN = ("study", "compare")
"""Whose runs are processes of their own."""
TIMES = ("table.csv", "curves.csv", "report.html", "speed.json", "summary.json", "environment.json", "compare.json")
"""Files that hold seconds, dates or memory; metrics.jsonl and state.json do too."""


def commands(material: Material, out: Path) -> dict[str, list[str]]:
    """What writes, by name."""
    report = material.root / "reported"
    if not report.exists():
        shutil.copytree(material.run, report)
    prepare = ["prepare", "--source", str(material.corpus), "--tokenizer", "bpe:280", "--out", str(out)]
    return {
        "train": material.train(out, "--resume"),
        "prepare": prepare,
        "convert": ["convert", str(material.plain), str(out), "--residual", "full"],
        "inspect": ["inspect", str(material.run), "--text", "stream read", "--out", str(out), "--no-progress"],
        "figures": ["figures", str(material.run / "inspection.json"), str(out), "--formats", "png"],
        "report": ["report", str(material.run), "--out", str(out)],
        "eval": ["eval", str(material.run), "--tasks", str(material.task), "--out", f"{out}/a.json", "--no-progress"],
        "export": ["export", str(material.run), str(out)],
        "study": material.study(out),
        "compare": material.compare(out),
    }


class Whole:
    """An uninterrupted command of this process's code: its files, how many changes it makes and how long it takes."""

    def __init__(self, material: Material, name: str) -> None:
        out = material.root / "whole" / name / "out"
        fresh(out)
        counter = out.parent.with_suffix(".count")
        counter.unlink(missing_ok=True)

        def count() -> None:
            with os.fdopen(os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
                file.write(b".")

        began = time.monotonic()
        code = wait(started(commands(material, out)[name], Changes(out.parent, count).install), 300)
        assert code == 0, f"{name} ended with {code}"
        self.seconds, self.changes = time.monotonic() - began, counter.stat().st_size
        self.digests = digests(out)


_wholes: dict[tuple[Path, str], Whole] = {}


def whole(material: Material, name: str) -> Whole:
    """Carry it out, once in this process: what an earlier one left may be of other code."""
    key = (material.root, name)
    if key not in _wholes:
        _wholes[key] = Whole(material, name)
    return _wholes[key]


def is_whole(material: Material, name: str, out: Path) -> bool:
    """Whether a folder has the files of an uninterrupted command; those that must be, to the byte."""
    ours, theirs = digests(out), whole(material, name).digests
    return ours == theirs if name in RESUMED else ours.keys() == theirs.keys()


def digests(folder: Path) -> dict[str, str]:
    """Hashes of the files that must be the same to the byte, by their names in the folder; of others the names."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"]
    same = [file for file in files if file.suffix in (".safetensors", ".npy", ".bin", ".jsonl") or "token" in file.name]
    named = {str(file.relative_to(folder)): "" for file in files if "logs" not in file.parts}
    same = [file for file in same if file.name != "metrics.jsonl" and file.name not in TIMES]
    return named | {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in same}


def fresh(out: Path) -> None:
    """An empty folder for `out` to be made in."""
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
