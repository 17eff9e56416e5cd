"""Ranks and launchers that are killed: the others end, and what was saved goes on bit for bit (`make test-scale`)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_two_ranks import configuration

from attnres.training.metrics import read

pytestmark = pytest.mark.scale

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
KILLS = int(os.environ.get("ATTNRES_KILLS", "3"))
"""Kills of each layout; a soak takes 60 and an hour."""


def start(file: Path) -> subprocess.Popen[str]:
    """`attnres train` of the configuration in a file, in two processes of a session of their own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "attnres", "train", "--config", str(file), "--no-progress"]
    with file.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, start_new_session=True
        )


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


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"shard": 2}, {"pp": 2}], ids=["whole", "shares", "stages"])
def test_killed_ranks_take_the_others_along_and_the_run_goes_on_bit_for_bit(corpus, tmp_path, parallel):
    if not Path("/proc/self/task").exists():
        pytest.skip("children are found in /proc")
    values = {"parallel": parallel, "steps": 40, "save_every": 2, "resume": True}
    files = {}
    for name in ("whole", "killed"):
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(configuration(corpus, tmp_path / name, **values)))
    assert start(files["whole"]).wait(timeout=300) == 0, files["whole"].with_suffix(".log").read_text()

    draw = random.Random(0)
    for number in range(KILLS):
        launcher = start(files["killed"])
        folder = tmp_path / "killed" / "checkpoint"
        before = folder.stat().st_mtime_ns if folder.exists() else 0
        while launcher.poll() is None and (not folder.exists() or folder.stat().st_mtime_ns == before):
            time.sleep(0.02)  # until it has saved once more
        time.sleep(draw.random())
        ranks = workers(launcher)
        target = launcher.pid if number % 3 == 2 or not ranks else draw.choice(ranks)
        os.kill(target, signal.SIGKILL)
        launcher.wait(timeout=60)
        deadline = time.monotonic() + 60
        while any(map(alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [pid for pid in ranks if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"ranks outlived the {'launcher' if target == launcher.pid else 'one'} that was killed"
    assert start(files["killed"]).wait(timeout=300) == 0, files["killed"].with_suffix(".log").read_text()
    clock = ("tokens_per_s", "step_s", "flops_per_s")
    whole, killed = (
        [{key: line[key] for key in line if key not in clock} for line in read(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "killed")
    )
    assert killed == whole
    assert (tmp_path / "killed/model/model.safetensors").read_bytes() == (
        tmp_path / "whole/model/model.safetensors"
    ).read_bytes()
