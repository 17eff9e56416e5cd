"""Runs of several processes whose ranks and launchers are killed at random, again and again: `make soak`.

    python tests/scale/soak.py --kills 200 --out build/soak.json

Each layout's run is killed in turn: mostly up to a second after it saved, when the next save is as likely as not
under way, else at any moment of its start. What is killed is a rank, or the launcher. Nothing of a launch may be left
after that. At the end a rank is killed once more under a launcher that starts it again, and what the run has then
measured and learned must be, bit for bit, that of a run that nobody disturbed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attnres.training.metrics import read

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"dp": 2},
    "shares": {"shard": 2, "async_save": True},
    "stages": {"pp": 2},
}
STEPS = 60
LOST = "another process of the run was lost"
PATIENCE_S = 90
"""Within which all that a kill leaves must have ended; torchrun's own is 30 seconds."""
CLOCK = ("tokens_per_s", "step_s", "flops_per_s")


class Trial:
    """One layout's run and its twin that nobody disturbs, in `folder`."""

    def __init__(self, folder: Path, values: dict[str, Any], seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.counts: Counter[str] = Counter()
        folder.mkdir(parents=True)
        for name in ("killed", "undisturbed"):
            more = {"out": str(folder / name), "resume": True, "steps": STEPS, "save_every": 2}
            (folder / f"{name}.json").write_text(json.dumps({**values, **more}))

    def start(self, name: str, restarts: int = 0) -> subprocess.Popen[str]:
        """`attnres train` in two processes, in a session of their own."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        torchrun += [f"--max-restarts={restarts}"]
        command = [*torchrun, "-m", "attnres", "train", "--config", str(self.folder / f"{name}.json"), "--no-progress"]
        with self.log(name).open("a") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def finished(self, name: str) -> bool:
        return (self.folder / name / "summary.json").exists()

    def saved(self) -> int:
        """When the run that is killed saved last; 0 for never."""
        state = self.folder / "killed" / "checkpoint" / "state.json"
        try:
            return state.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def kill(self) -> None:
        """Start the run where it stands, kill one of its processes, and see that none outlives that.

        Raises:
            AssertionError: one does, or it is not said in one sentence that one was lost.
        """
        before, said = self.saved(), self.log("killed").read_text().count(LOST) if self.log("killed").exists() else 0
        launcher = self.start("killed")
        in_training = self.draw.random() < 0.8
        until = time.monotonic() + (300 if in_training else 10 * self.draw.random())
        while launcher.poll() is None and time.monotonic() < until and not (in_training and self.saved() != before):
            time.sleep(0.02)
        if in_training:
            time.sleep(self.draw.random())
        ranks = workers(launcher)
        of_launcher = not ranks or self.draw.random() < 0.3
        target = launcher.pid if of_launcher else self.draw.choice(ranks)
        self.ended(launcher, ranks, target)
        count = self.log("killed").read_text().count(LOST) - said
        self.counts["launcher" if of_launcher else "rank"] += 1
        self.counts["in a save"] += bool(list((self.folder / "killed").glob(".checkpoint.*.new")))
        self.counts["lost, said so"] += count
        assert count <= 1, "more than one process said that one was lost"

    def ended(self, launcher: subprocess.Popen[str], ranks: list[int], target: int) -> None:
        """Kill `target` and wait until nothing of the launch is left."""
        if launcher.poll() is None and alive(target):
            os.kill(target, signal.SIGKILL)
        try:
            launcher.wait(timeout=PATIENCE_S)
            until = time.monotonic() + PATIENCE_S
            while any(map(alive, ranks)) and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            left = [pid for pid in ranks if alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            if launcher.poll() is None:
                launcher.kill()
        assert not left, f"{len(left)} processes outlived the one that was killed"

    def finish(self) -> None:
        """Lose a rank once more, with a launcher that starts all of them again; compare with the undisturbed run."""
        undisturbed = self.start("undisturbed")
        assert undisturbed.wait(timeout=900) == 0, self.log("undisturbed").read_text()[-4000:]
        if not self.finished("killed"):
            before, launcher = self.saved(), self.start("killed", restarts=2)
            while launcher.poll() is None and self.saved() == before:
                time.sleep(0.02)
            if ranks := workers(launcher):
                os.kill(self.draw.choice(ranks), signal.SIGKILL)
                self.counts["started again"] += 1
            assert launcher.wait(timeout=900) == 0, self.log("killed").read_text()[-4000:]
        runs = [self.folder / name for name in ("killed", "undisturbed")]
        lines = [
            [{k: v for k, v in line.items() if k not in CLOCK} for line in read(r / "metrics.jsonl")] for r in runs
        ]
        assert lines[0] == lines[1], "other lines than the undisturbed run's"
        weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
        assert weights[0] == weights[1], "another model than the undisturbed run's"
        stray = [path.name for path in runs[0].rglob(".*") if path.name.endswith((".new", ".old"))]
        assert not stray, f"left behind: {stray}"


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


def soak(folder: Path, values: dict[str, Any], kills: int, seed: int) -> dict[str, int]:
    """So many kills of runs with these values; what was killed how often.

    A run that has come to its end in spite of them makes room for another.
    """
    counts: Counter[str] = Counter()
    number = 0
    while counts["rank"] + counts["launcher"] < kills:
        number += 1
        trial = Trial(folder / str(number), values, seed + number)
        while counts["rank"] + counts["launcher"] + trial.counts["rank"] + trial.counts["launcher"] < kills:
            if trial.finished("killed"):
                break
            trial.kill()
        trial.finish()
        counts += trial.counts
    return dict(counts)


def main() -> None:
    """Soak all layouts, and write what was killed."""
    from test_two_ranks import configuration

    from attnres.data import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"))
    options = parser.parse_args()
    began, results = time.time(), {}
    with tempfile.TemporaryDirectory() as temporary:
        corpus = prepare("task:composition:400", "bpe:280", out=Path(temporary) / "corpus", progress=False).path
        for place, (name, parallel) in enumerate(LAYOUTS.items()):
            share = options.kills // len(LAYOUTS) + (place < options.kills % len(LAYOUTS))
            values = configuration(corpus, Path(temporary), parallel=parallel)
            results[name] = soak(Path(temporary) / name, values, share, options.seed + 1000 * place)
            print(name, results[name], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"kills": options.kills, "seed": options.seed, "minutes": (time.time() - began) / 60, "layouts": results}
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
