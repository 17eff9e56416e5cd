"""A disk that is full from the n-th write on, for every n: one sentence, what was there intact, and the rest later.

The fault is put under `attnres.files` and the libraries' own writing of weights and figures: from the n-th call on
every write, sync, rename and new folder below the campaign's folder fails.
"""

import builtins
import errno
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.forked import forked
from fuzz.inputs import snapshot
from fuzz.material import Material
from fuzz.tally import Tally


class Changes:
    """Calls `before` before every change to files below `root` that this process makes, once it is installed."""

    def __init__(self, root: Path, before: Callable[[], None]) -> None:
        self.root, self.before = str(root), before

    def install(self) -> None:
        import safetensors
        import safetensors.torch

        files = (os.fsync, os.mkdir, os.rename, os.replace, os.unlink, os.rmdir)
        watched = map(self._watched, files)
        os.fsync, os.mkdir, os.rename, os.replace, os.unlink, os.rmdir = watched  # ty: ignore[invalid-assignment]
        for name in ("write_text", "write_bytes"):  # the others are those of os, and would count twice
            setattr(pathlib.Path, name, self._watched(getattr(pathlib.Path, name)))
        open_ = builtins.open

        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if set(mode) & set("wax+") and str(file).startswith(self.root):
                self.before()
            return open_(file, mode, *rest, **more)

        builtins.open = opened  # ty: ignore[invalid-assignment]
        write = safetensors.serialize_file

        def serialised(*rest: Any, **more: Any) -> Any:
            try:
                self.before()
            except OSError as error:
                raise safetensors.SafetensorError(f"I/O error: {error.strerror} (os error 28)") from error
            return write(*rest, **more)

        for module in (safetensors, safetensors.torch):
            setattr(module, "serialize_file", serialised)  # noqa: B010 (its signature is another)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*rest: Any, **more: Any) -> Any:
            if not rest or isinstance(rest[0], int) or str(rest[0]).startswith(self.root):
                self.before()
            return function(*rest, **more)

        return watched


class FullDisk:
    """Fails as a full disk does from the n-th write below `root` on; `install` puts it under this process."""

    def __init__(self, root: Path, after: int) -> None:
        self.changes, self.left = Changes(root, self._count), after

    def install(self) -> None:
        unlink, rmdir = os.unlink, os.rmdir  # a full disk lets files be removed
        self.changes.install()
        os.unlink, os.rmdir = unlink, rmdir

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def commands(material: Material, out: Path) -> dict[str, list[str]]:
    """What writes, by name."""
    report = material.root / "reported"
    if not report.exists():
        shutil.copytree(material.run, report)
    return {
        "train": material.train(out, "--resume"),
        "prepare": ["prepare", "--source", str(material.corpus), "--tokenizer", "bpe:280", "--out", str(out)],
        "convert": ["convert", str(material.plain), str(out), "--residual", "full"],
        "inspect": ["inspect", str(material.run), "--text", "stream read", "--out", str(out), "--no-progress"],
        "figures": ["figures", str(material.run / "inspection.json"), str(out), "--formats", "png"],
        "report": ["report", str(material.run), "--out", str(out)],
        "eval": ["eval", str(material.run), "--tasks", str(material.task), "--out", f"{out}/a.json", "--no-progress"],
        "export": ["export", str(material.run), str(out)],
        "study": material.study(out),
        "compare": material.compare(out),
    }


RESUMED = ("train", "prepare", "convert")
"""Whose result must be that of an uninterrupted run to the byte, once there is room."""
CHILDREN = ("study", "compare")
"""Whose runs are processes of their own: there the disk is full for the one that starts them alone."""


def try_full_disks(
    material: Material, tally: Tally, cases: int, *, only: tuple[str, ...] = (), more: Callable[[], bool] = lambda: True
) -> None:
    """Fill the disk at so many writes, command after command, each from its first write to its last."""
    out = material.root / "full" / "out"
    names = only or tuple(name for name in commands(material, out) if name not in CHILDREN)
    places = tally.record.setdefault("disk", {"place": 0, "after": 0})
    for _ in range(cases):
        if not more():
            return
        name = names[places["place"] % len(names)]
        ended = _try(material, tally, name, places["after"], out)
        places["after"] += 1
        if ended:  # it took no more writes than that
            places["place"], places["after"] = places["place"] + 1, 0


def _try(material: Material, tally: Tally, name: str, after: int, out: Path) -> bool:
    """One command on one disk; returns whether it ended without meeting the end of the disk."""
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
    words, before = commands(material, out)[name], snapshot(material)
    outcome = forked(words, inside=FullDisk(out.parent, after).install)
    verdict = "changed" if snapshot(material) != before else outcome.verdict
    said = outcome.said
    if verdict == "refused" and name in RESUMED:
        whole = material.root / f"room-{name}"
        if not whole.exists():
            forked(commands(material, whole)[name])
        later = forked(words)
        if later.verdict != "done" or not is_whole(name, out, digests(whole)):
            verdict, said = "different", later.said
    tally.count("full disks", verdict, f"{name}, full after {after} writes", said=said[-600:])
    return outcome.code == 0


TIMES = ("table.csv", "curves.csv", "report.html", "speed.json", "summary.json", "environment.json", "compare.json")
"""Files that hold seconds, dates or memory; metrics.jsonl and state.json do too."""


def is_whole(name: str, out: Path, whole: dict[str, str]) -> bool:
    """Whether a folder has the files of an uninterrupted command; those that must be, to the byte."""
    made = digests(out)
    return made == whole if name in RESUMED else made.keys() == whole.keys()


def digests(folder: Path) -> dict[str, str]:
    """Hashes of the files that must be the same to the byte, by their names in the folder; of others the names."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"]
    same = [file for file in files if file.suffix in (".safetensors", ".npy", ".bin", ".jsonl") or "token" in file.name]
    named = {str(file.relative_to(folder)): "" for file in files if "logs" not in file.parts}
    same = [file for file in same if file.name != "metrics.jsonl" and file.name not in TIMES]
    return named | {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in same}
