"""A disk that is full from the n-th write on, for every n: one sentence, what was there intact, and the rest later.

The fault is put under `attnres.files` and the libraries' own writing of weights and figures: from the n-th call on
every write, sync, rename and new folder below the campaign's folder fails.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from fuzz.changes import Changes
from fuzz.forked import forked
from fuzz.inputs import snapshot
from fuzz.material import Material
from fuzz.tally import Tally
from fuzz.writing import CHILDREN, commands, fresh, is_whole, whole


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


def try_full_disks(
    material: Material, tally: Tally, cases: int, *, only: tuple[str, ...] = (), more: Callable[[], bool] = lambda: True
) -> None:
    """Fill the disk at so many writes, command after command, each from its first write to its last."""
    names = only or tuple(name for name in commands(material, material.root) if name not in CHILDREN)
    places = tally.record.setdefault("disk", {"place": 0, "after": 0})
    for _ in range(cases):
        if not more() or places["place"] == len(names):
            return
        name = names[places["place"]]
        verdict, said = _try(material, name, places["after"])
        tally.count("full disks", verdict, f"{name}, full after {places['after']} writes", said=said)
        places["after"] += 1
        if places["after"] >= whole(material, name).changes:
            places["place"], places["after"] = places["place"] + 1, 0


def retry_full_disks(material: Material, tally: Tally) -> None:
    """Try again what failed."""
    for failure in tally.failures("full disks"):
        name, _, rest = failure["what"].partition(", full after ")
        tally.again(failure, *_try(material, name, int(rest.split()[0])))


def _try(material: Material, name: str, after: int) -> tuple[str, str]:
    """One command on one disk: done whole, or refused and done whole once there is room; what it said."""
    out = material.root / "full" / "out"
    fresh(out)
    words, before = commands(material, out)[name], snapshot(material)
    outcome = forked(words, inside=FullDisk(out.parent, after).install)
    verdict = "changed" if snapshot(material) != before else outcome.verdict
    said = outcome.said
    if verdict in ("done", "refused"):
        later = forked(words) if verdict == "refused" else outcome
        if later.verdict != "done" or not is_whole(material, name, out):
            verdict, said = "different", later.said
    return verdict, said[-600:]
