"""SIGKILL at any moment: the same command again ends with the files of an uninterrupted one, and leaves nothing.

A process is killed after some time, or just before its n-th change to a file: between two writes is where what is
half done shows. Processes are forked; a comparison's runs are processes of their own, as anywhere.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fuzz.changes import Changes
from fuzz.forked import WALL, forked, started, wait
from fuzz.material import Material
from fuzz.tally import Tally
from fuzz.writing import commands, digests, fresh, is_whole, whole

COMMANDS = (
    *("train", "prepare", "convert", "train", "inspect", "prepare in parts", "convert", "train"),
    *("prepare", "convert", "figures", "train", "eval", "prepare", "convert", "train", "export", "report"),
)
"""In which order: those with more to lose more often. `compare` and `study` have their own soak."""
LEFT_S = 60.0
"""Seconds in which a comparison's runs must have ended after it was killed."""


class Kill:
    """Kills this process just before its n-th change below a folder."""

    def __init__(self, root: Path, after: int) -> None:
        self.changes = Changes(root, self._count)
        self.left = after

    def install(self) -> None:
        self.changes.install()

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def try_kills(
    material: Material,
    tally: Tally,
    kills: int,
    *,
    only: tuple[str, ...] = COMMANDS,
    more: Callable[[], bool] = lambda: True,
) -> None:
    """Kill so many processes, each command as often as it takes until it ends."""
    while kills > 0 and more():
        soak = tally.record.setdefault("soaks", 0)
        tally.record["soaks"] = soak + 1
        kills -= _soak(material, tally, only[soak % len(only)], random.Random(soak), soak)


def try_comparisons(material: Material, tally: Tally, kills: int, *, more: Callable[[], bool] = lambda: True) -> None:
    """Kill so many comparisons and studies: real processes, whose runs must end with them."""
    while kills > 0 and more():
        soak = tally.record.setdefault("comparisons", 0)
        tally.record["comparisons"] = soak + 1
        kills -= _soak_comparison(material, tally, ("compare", "study")[soak % 2], random.Random(soak), soak)


def _soak(material: Material, tally: Tally, name: str, draw: random.Random, soak: int) -> int:
    """Kill one command up to six times, then let it end. Returns how many kills there were."""
    out = material.root / "killed" / "out"
    undisturbed = whole(material, name)
    fresh(out)
    words, kills = commands(material, out)[name], 0
    for _ in range(draw.choice((2, 4, 6))):
        if draw.random() < 0.7:
            child = started(words, Kill(out.parent, draw.randrange(undisturbed.changes)).install)
        else:
            child = started(words)
            time.sleep(draw.uniform(0.0, 1.0) * undisturbed.seconds)
            os.kill(child, signal.SIGKILL)
        code = wait(child, 120)
        if code == -signal.SIGKILL:
            kills += 1
            orphans = _orphans(out, child)
            tally.count("kills", "orphan" if orphans else "survived", f"{name}, soak {soak}", said=str(orphans))
        elif code != 0 and not (code == 2 and is_whole(material, name, out)):  # refused: it was there already
            tally.count("kills", "different", f"{name}, soak {soak}: ended with {code}")
    outcome = forked(words, seconds=120)
    strays = [str(path) for path in out.parent.rglob(".*")]
    same = outcome.code in (0, 2) and is_whole(material, name, out)
    verdict = "stray" if strays else "same bytes" if same else "different"
    tally.count("killed and resumed", verdict, f"{name}, soak {soak}", said=f"{strays[:5]} {outcome.said[-600:]}")
    return max(1, kills)


def _soak_comparison(material: Material, tally: Tally, name: str, draw: random.Random, soak: int) -> int:
    out = material.root / "killed" / name
    lines = {"compare": material.compare, "study": material.study}
    undisturbed = {"compare": material.comparison, "study": material.studies / "seconds" / "growth"}[name]
    fresh(out)
    kills = 0
    for _ in range(draw.choice((2, 3))):
        process = _process(lines[name](out))
        _until_runs(process, out)
        time.sleep(draw.uniform(0.0, 12.0))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            orphans = _orphans(out, process.pid)
            tally.count("kills", "orphan" if orphans else "survived", f"{name}, soak {soak}", said=str(orphans))
    code = _process(lines[name](out)).wait()
    made = out if name == "compare" else out / "seconds" / "growth"
    same = digests(made) == {name: value for name, value in digests(undisturbed).items() if name != "speed.json"}
    strays = [str(path) for path in (*out.parent.rglob(".*"), *out.parent.rglob("*.error"))]
    verdict = "different" if code or not same else "stray" if strays else "same bytes"
    tally.count("killed and resumed", verdict, f"{name}, soak {soak}", said=f"ended with {code} {strays[:5]}")
    return max(1, kills)


def _process(words: list[str]) -> subprocess.Popen:
    command = ["lab", *words[1:]] if words[0] == "study" else ["attnres", *words]
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _until_runs(process: subprocess.Popen, out: Path) -> None:
    """Wait until runs have been started, or the process has ended."""
    until = time.monotonic() + WALL * LEFT_S
    while process.poll() is None and not _working_on(out, process.pid) and time.monotonic() < until:
        time.sleep(0.1)


def _orphans(out: Path, killed: int) -> list[int]:
    """Processes that work for a killed one and have not ended in time."""
    until = time.monotonic() + LEFT_S
    while (left := _working_on(out, killed)) and time.monotonic() < until:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return left


def _working_on(out: Path, first: int) -> list[int]:
    """Processes of attnres that name a folder, or are in the session of the `first`, which is left out."""
    numbers = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) not in (os.getpid(), first):
            try:
                line = (folder / "cmdline").read_bytes()
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            state, session = fields[0], int(fields[3])
            if state != "Z" and (session == first or (os.fsencode(out) in line and b"attnres" in line)):
                numbers.append(int(folder.name))
    return numbers
