"""Runs of several processes whose ranks and launchers are killed at random, again and again: `make soak`.

    python tests/scale/soak.py --kills 200 --out build/soak.json

Each layout's run is killed in turn: mostly up to a second after it saved, when the next save is as likely as not
under way, else at any moment of its start. What is killed is a rank, or the launcher. Nothing of a launch may be left
after that. At the end a rank is killed once more under a launcher that starts it again, and what the run has then
measured and learned must be, bit for bit, that of a run that nobody disturbed.

After every kill --out says what was killed so far. Interrupted, the same command goes on from there, with the runs in
the folder beside it that has its name.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch import torchrun
from lines import lines
from tiny import MOE

from attnres.files import write_json

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"parallel": {"dp": 2}},
    "shares": {"parallel": {"shard": 2, "async_save": True}},
    "stages": {"parallel": {"pp": 2}},
    "experts": {"parallel": {"shard": 2, "ep": 2}, "model": {"size": MOE}},
}
STEPS = 60
LOST = "another process of the run was lost"
PATIENCE_S = 90
"""Within which all that a kill leaves must have ended; torchrun's own is 30 seconds."""


class Trial:
    """One run in `folder` that is killed, and the run in `undisturbed` that it must equal.

    Attributes:
        counts: what was killed so far.
    """

    def __init__(self, folder: Path, undisturbed: Path, values: dict[str, Any], counts: dict[str, int]) -> None:
        self.folders = {"killed": folder, "undisturbed": undisturbed}
        self.counts = Counter(counts)
        for run in self.folders.values():
            run.parent.mkdir(parents=True, exist_ok=True)
            more = {"out": str(run), "resume": True, "steps": STEPS, "save_every": 2}
            run.with_suffix(".json").write_text(json.dumps({**values, **more}))

    def start(self, name: str, restarts: int = 0) -> subprocess.Popen[str]:
        """`attnres train` in two processes, in a session of their own."""
        config = str(self.folders[name].with_suffix(".json"))
        command = ["-m", "attnres", "train", "--config", config, "--no-progress"]
        with self.log(name).open("a") as log:
            return subprocess.Popen(
                torchrun(2, f"--max-restarts={restarts}", *command),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.folders[name].with_suffix(".log")

    def finished(self, name: str) -> bool:
        return (self.folders[name] / "summary.json").exists()

    def saved(self) -> int:
        """When the run that is killed saved last; 0 for never."""
        state = self.folders["killed"] / "checkpoint" / "state.json"
        try:
            return state.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def kill(self, draw: random.Random) -> None:
        """Start the run where it stands, kill one of its processes, and see that none outlives that. A run that ends
        before is no kill.

        Raises:
            AssertionError: one does, or it is not said in one sentence that one was lost.
        """
        before, said = self.saved(), self.log("killed").read_text().count(LOST) if self.log("killed").exists() else 0
        with launched(self.start("killed")) as launcher:
            in_training = draw.random() < 0.8
            until = time.monotonic() + (300 if in_training else 10 * draw.random())
            while launcher.poll() is None and time.monotonic() < until and not (in_training and self.saved() != before):
                time.sleep(0.02)
            if in_training:
                time.sleep(draw.random())
            ranks = workers(launcher)
            of_launcher = not ranks or draw.random() < 0.3
            if not self.ended(launcher, ranks, launcher.pid if of_launcher else draw.choice(ranks)):
                assert self.finished("killed"), self.log("killed").read_text()[-4000:]
                return
        count = self.log("killed").read_text().count(LOST) - said
        self.counts["launcher" if of_launcher else "rank"] += 1
        self.counts["in a save"] += bool(list(self.folders["killed"].glob(".checkpoint.*.new")))
        self.counts["lost, said so"] += count
        assert count <= 1, "more than one process said that one was lost"

    def ended(self, launcher: subprocess.Popen[str], ranks: list[int], target: int) -> bool:
        """Kill `target`, wait until nothing of the launch is left, and return whether there was something to kill."""
        killed = launcher.poll() is None and alive(target)
        if killed:
            os.kill(target, signal.SIGKILL)
        launcher.wait(timeout=PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while (left := [pid for pid in ranks if alive(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes outlived the one that was killed"
        return killed

    def finish(self, draw: random.Random) -> None:
        """Lose a rank once more, with a launcher that starts all of them again; compare with the undisturbed run, which
        is made where there is none."""
        if not self.finished("undisturbed"):
            shutil.rmtree(self.folders["undisturbed"], ignore_errors=True)  # of an interrupted soak
            with launched(self.start("undisturbed")) as launcher:
                assert launcher.wait(timeout=900) == 0, self.log("undisturbed").read_text()[-4000:]
        if not self.finished("killed"):
            before = self.saved()
            with launched(self.start("killed", restarts=2)) as launcher:
                while launcher.poll() is None and self.saved() == before:
                    time.sleep(0.02)
                if ranks := workers(launcher):
                    os.kill(draw.choice(ranks), signal.SIGKILL)
                    self.counts["started again"] += 1
                assert launcher.wait(timeout=900) == 0, self.log("killed").read_text()[-4000:]
        runs = list(self.folders.values())
        assert lines(runs[0]) == lines(runs[1]), "other lines than the undisturbed run's"
        weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
        assert weights[0] == weights[1], "another model than the undisturbed run's"
        stray = [path.name for path in runs[0].rglob(".*") if path.name.endswith((".new", ".old"))]
        assert not stray, f"left behind: {stray}"


@contextmanager
def launched(launcher: subprocess.Popen[str]) -> Generator[subprocess.Popen[str]]:
    """End the launcher with the block, however that ends; its ranks notice."""
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


def workers(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that a launcher has started."""
    try:
        text = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Soak:
    """Kills of one layout's runs, one run after the other, in `folder`.

    Attributes:
        counts: what was killed in runs that came to their end and equalled the undisturbed one.
        trials: how many runs those were.
        trial: the run that is killed now.
    """

    def __init__(self, folder: Path, values: dict[str, Any], kills: int, seed: str, past: Any = None) -> None:
        self.folder, self.values, self.kills, self.seed = folder, values, kills, seed
        past = past or {"counts": {}, "trials": 0, "going on": {}}
        self.counts, self.trials = Counter(past["counts"]), past["trials"]
        self.trial = self._trial(past["going on"])

    def _trial(self, counts: dict[str, int]) -> Trial:
        folder = self.folder / str(self.trials + 1) / "killed"
        return Trial(folder, self.folder / "undisturbed", self.values, counts)

    @property
    def done(self) -> int:
        """Kills so far."""
        return sum(counts[what] for counts in (self.counts, self.trial.counts) for what in ("rank", "launcher"))

    def state(self) -> dict[str, Any]:
        """What `past` of another `Soak` takes, which then goes on from here."""
        return {"counts": dict(self.counts), "trials": self.trials, "going on": dict(self.trial.counts)}

    def kill(self) -> None:
        """Kill once; after the last kill, or when the run has come to its end in spite of all, finish it.

        Raises:
            AssertionError: something that a kill must not do.
        """
        draw = random.Random(f"{self.seed} {self.trials} {self.done}")
        if self.done < self.kills and not self.trial.finished("killed"):
            self.trial.kill(draw)
        if self.done >= self.kills or self.trial.finished("killed"):
            self.trial.finish(draw)
            self.counts += self.trial.counts
            self.trials += 1
            self.trial = self._trial({})


def main() -> None:
    """Soak all layouts in turn, and write what was killed."""
    from test_two_ranks import configuration

    from attnres.data import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.out.with_suffix("").absolute()
    past = json.loads(options.out.read_text()) if options.out.exists() and folder.exists() else {}
    if past and past["seed"] != options.seed:
        sys.exit(f"{options.out} is of the seed {past['seed']}: give another --out, or remove it")
    if not past:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = prepare("task:composition:400", "bpe:280", out=folder / "corpus", progress=False).path
    soaks = {}
    for place, (name, layout) in enumerate(LAYOUTS.items()):
        share = options.kills // len(LAYOUTS) + (place < options.kills % len(LAYOUTS))
        values, seed = configuration(corpus, folder, **layout), f"{options.seed} {name}"
        soaks[name] = Soak(folder / name, values, share, seed, past.get("layouts", {}).get(name))
    began, before = time.monotonic(), past.get("minutes", 0.0)
    first = sum(soak.done for soak in soaks.values())
    while left := {name: soak for name, soak in soaks.items() if soak.done < soak.kills}:
        name, soak = min(left.items(), key=lambda item: item[1].done / item[1].kills)
        soak.kill()
        done, minutes = sum(soak.done for soak in soaks.values()), (time.monotonic() - began) / 60
        layouts = {name: soak.state() for name, soak in soaks.items()}
        report = {"kills": done, "seed": options.seed, "minutes": before + minutes, "layouts": layouts}
        write_json(options.out, report)
        ahead = minutes / max(1, done - first) * (options.kills - done)
        print(
            f"{done} of {options.kills} kills, {name} {soak.done} of {soak.kills}, {ahead:.0f} minutes left", flush=True
        )
    print(json.dumps(layouts, indent=2))


if __name__ == "__main__":
    main()
