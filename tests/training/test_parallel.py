"""Two processes under torchrun are one run: the same losses, one folder, stopping and going on together."""

import json
import math
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnres.errors import UserError
from attnres.training import TrainConfig, parallel, to_dict, train
from attnres.training.metrics import read
from attnres.training.parallel import join_processes

SCRIPT = """
import faulthandler, json, os, signal, sys
faulthandler.dump_traceback_later(240)  # where each one waits, before the test's own patience ends
from attnres.errors import Interrupted
from attnres.training import from_dict, train, validate
from attnres.training.run import Run

whole, parts = (from_dict(values) for values in json.loads(sys.argv[1]))
summary = train(whole, progress=False)

step = Run.step
def with_signal(run, signals):  # one process of the two gets it
    if run.past.step == 2 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    step(run, signals)
Run.step = with_signal
try:
    train(parts, progress=False)
except Interrupted as error:
    assert error.code == 143
else:
    raise AssertionError("not interrupted")
Run.step = step
parts.resume = True
assert train(parts, progress=False)["val_loss"] == summary["val_loss"]
"""


def lines(folder: Path) -> list[dict[str, Any]]:
    clock = ("tokens_per_s", "step_s", "flops_per_s")
    return [{key: line[key] for key in line if key not in clock} for line in read(folder / "metrics.jsonl")]


def test_two_processes_are_one_run(configure: Callable[..., TrainConfig], tmp_path: Path) -> None:
    configs = [configure(out=out, accumulation=2, steps=6) for out in ("two", "parts")]
    for config in configs:
        config.data.val_windows = 5  # not even shares
        config.parallel.dp = 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    arguments = json.dumps([to_dict(config) for config in configs])
    command = [*torchrun, sys.executable, "-c", SCRIPT, arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launched:
        try:
            output = launched.communicate(timeout=300)[0]
        except subprocess.TimeoutExpired:
            launched.terminate()  # torchrun ends its workers; a kill would leave them behind
            output = f"timed out: {launched.communicate()[0]}"
    assert launched.returncode == 0, output
    config = configure(out="one", accumulation=2, steps=6)
    config.data.val_windows = 5
    train(config, progress=False)

    one, two, parts = (lines(tmp_path / out) for out in ("one", "two", "parts"))
    assert [(line["kind"], line["step"]) for line in one] == [(line["kind"], line["step"]) for line in two]
    for ours, theirs in zip(one, two):
        for name in ("loss", "grad_norm", "se"):
            assert math.isclose(ours.get(name, 0), theirs.get(name, 0), rel_tol=2e-5), (name, ours, theirs)
    left, right = (np.load(tmp_path / out / "val" / "000006.npy") for out in ("one", "two"))
    assert left.shape == (5,) and np.allclose(left, right, rtol=2e-5)
    assert parts == two  # stopped by a signal to one process and resumed: bit for bit


LEAVE = """
import faulthandler
import torch.distributed as dist
from torch import nn
from attnres.training import parallel

faulthandler.dump_traceback_later(120, exit=True)
held = []
parallel.gc.collect = held.clear  # lets the wrapped model go where the collector would, in microseconds
for _ in range(400):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held.append(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    dist.all_gather_object([None], "a tensor that only a thread of gloo still has")
    parallel._leave()
"""


def test_leaving_the_group_waits_for_no_thread_that_waits_for_python() -> None:
    """Without the reference that `_leave` holds, one of some hundred times hangs."""
    left = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True)
    assert left.returncode == 0, left.stderr


def test_one_process_needs_no_group() -> None:
    who = join_processes("cpu")
    assert (who.rank, who.world_size, who.first, who.gather({"a": 1}), who.share(2)) == (0, 1, True, [{"a": 1}], 2)
    model = torch.nn.Linear(2, 2)
    assert who.wrap(model) is model and who.sum(torch.ones(2)).tolist() == [1, 1]
    who.wait()


@pytest.mark.parametrize(("rank", "error"), [("0", UserError), ("1", SystemExit)])
def test_a_process_whose_torchrun_was_lost_before_it_could_ask_ends(monkeypatch, rank, error):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": rank, "WORLD_SIZE": "2"}
    for name, value in {**where, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "JOINING", timedelta(seconds=0.5))
    with pytest.raises(error) as refused:
        join_processes("cpu")
    assert rank == "1" or f"nobody answers at 127.0.0.1:{port}" in str(refused.value)
    assert rank == "0" or refused.value.code == 2
