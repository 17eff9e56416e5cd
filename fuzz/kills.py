"""SIGKILL at any moment: the same command again ends with the files of an uninterrupted one, and leaves nothing."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fuzz.material import SIZE, STEPS, Material
from fuzz.tally import Tally

COMMANDS = ("train", "train", "compare", "prepare", "convert")
TIMES = ("table.csv", "curves.csv", "report.html", "speed.json", "summary.json", "environment.json", "compare.json")
"""Files that hold seconds, dates or memory; metrics.jsonl and state.json do too."""
LEFT_S = 15.0
"""Seconds in which a comparison's runs must have ended after it was killed."""


def try_kills(material: Material, tally: Tally, kills: int, *, more: Callable[[], bool] = lambda: True) -> None:
    """Kill so many processes, each command as often as it takes until it ends."""
    while kills > 0 and more():
        number = tally.tried("kills")
        command = COMMANDS[number % len(COMMANDS)]
        kills -= _soak(material, tally, command, random.Random(number), number)


def _soak(material: Material, tally: Tally, command: str, draw: random.Random, number: int) -> int:
    """Kill one command up to three times, then let it end. Returns how many kills there were."""
    whole, out = material.root / f"whole-{command}", material.root / "killed" / command
    if not whole.exists():
        _start(material, command, whole).wait()
    began = time.monotonic()
    _fresh(out)
    _start(material, command, out).wait()
    wall = time.monotonic() - began
    _fresh(out)
    kills = 0
    for _ in range(draw.choice((1, 2, 3))):
        process = _start(material, command, out)
        try:
            process.wait(draw.uniform(0.3, 1.0) * wall)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            orphans = _orphans(out)
            tally.count("kills", "orphan" if orphans else "survived", f"{command}, seed {number}", said=str(orphans))
    _start(material, command, out).wait()
    same = _digests(whole) == _digests(out)
    strays = [str(path) for path in out.parent.rglob(".*") if path.name != ".gitkeep"]
    verdict = "different" if not same else "stray" if strays else "same bytes"
    tally.count("killed and resumed", verdict, f"{command}, seed {number}", said=" ".join(strays[:5]))
    return max(1, kills)


def _start(material: Material, command: str, out: Path) -> subprocess.Popen:
    lines = {
        "train": material.train(out, "--resume"),
        "compare": _compare(material, out),
        "prepare": ["prepare", "--source", str(material.corpus), "--tokenizer", "bpe:280", "--out", str(out)],
        "convert": ["convert", str(material.plain), str(out), "--residual", "full"],
    }
    return subprocess.Popen(
        [sys.executable, "-m", "attnres", *lines[command]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _compare(material: Material, out: Path) -> list[str]:
    flags = ["--variants", "standard", "full", "--source", str(material.tokens), "--size", SIZE, "--seq-len", "16"]
    flags += ["--batch-size", "2", "--val-windows", "4", "--steps", str(STEPS), "--val-every", "4", "--save-every", "3"]
    return [
        "compare",
        *flags,
        "--timing-s",
        "0",
        "--jobs",
        "2",
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--out",
        str(out),
    ]


def _fresh(out: Path) -> None:
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)


def _orphans(out: Path) -> list[int]:
    """Processes that work for a killed one and have not ended in time."""
    until = time.monotonic() + LEFT_S
    while (left := _working_on(out)) and time.monotonic() < until:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return left


def _working_on(out: Path) -> list[int]:
    numbers = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(out) in line and b"attnres" in line:
                numbers.append(int(folder.name))
    return numbers


def _digests(folder: Path) -> dict[str, str]:
    """Hashes of the files that must be the same to the byte, by their names in the folder."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"]
    same = [file for file in files if file.suffix in (".safetensors", ".npy", ".bin", ".jsonl") or "token" in file.name]
    named = {str(file.relative_to(folder)): "" for file in files if "logs" not in file.parts}
    same = [file for file in same if file.name != "metrics.jsonl" and file.name not in TIMES]
    return named | {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in same}
