"""Two processes under torchrun are one run: the same losses, one folder, stopping and going on together."""

import json
import math
import re
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
from launch import PATIENCE_S, torchrun
from lines import lines

from attnres.errors import UserError
from attnres.training import TrainConfig, parallel, to_dict, train
from attnres.training.parallel import join_processes
from attnres.training.prepare import check

GPT2 = {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}

SCRIPT = """
import faulthandler, json, os, signal, sys
faulthandler.dump_traceback_later(1500)  # where each one waits, before the test's own patience ends
from attnres.errors import Interrupted
from attnres.training import from_dict, train, validate
from attnres.training.run import Run

two, whole, parts = (from_dict(values) for values in json.loads(sys.argv[1]))
train(two, progress=False)
summary = train(whole, progress=False)

step = Run.step
def with_signal(run, signals):  # one process of the two gets it
    if run.run_state.step == 2 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    step(run, signals)
Run.step = with_signal
try:
    train(parts, progress=False)
except (Interrupted, SystemExit) as error:  # the first says it, the other leaves
    assert error.code == 143 and isinstance(error, Interrupted) == (os.environ["RANK"] == "0")
else:
    raise AssertionError("not interrupted")
Run.step = step
parts.resume = True
assert train(parts, progress=False)["val_loss"] == summary["val_loss"]
"""


@pytest.mark.long
def test_two_processes_are_one_run(configure: Callable[..., TrainConfig], tmp_path: Path) -> None:
    configs = [configure(out=out, accumulation=2, steps=6) for out in ("two", "whole", "parts")]
    for config in configs[1:]:  # of which every process draws others
        config.model.size = {**GPT2, "resid_pdrop": 0.3}
    for config in configs:
        config.data.val_windows = 5  # not even shares
        config.parallel.dp = 2
    arguments = json.dumps([to_dict(config) for config in configs])
    command = torchrun(2, "--no-python", sys.executable, "-c", SCRIPT, arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launched:
        try:
            output = launched.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            launched.terminate()  # torchrun ends its workers; a kill would leave them behind
            output = f"timed out: {launched.communicate()[0]}"
    assert launched.returncode == 0, output
    config = configure(out="one", accumulation=2, steps=6)
    config.data.val_windows = 5
    train(config, progress=False)

    one, two, whole, parts = (lines(tmp_path / out) for out in ("one", "two", "whole", "parts"))
    assert [(line["kind"], line["step"]) for line in one] == [(line["kind"], line["step"]) for line in two]
    for ours, theirs in zip(one, two):
        for name in ("loss", "grad_norm", "se"):
            assert math.isclose(ours.get(name, 0), theirs.get(name, 0), rel_tol=2e-5), (name, ours, theirs)
    left, right = (np.load(tmp_path / out / "val" / "000006.npy") for out in ("one", "two"))
    assert left.shape == (5,) and np.allclose(left, right, rtol=2e-5)
    assert parts == whole  # stopped by a signal to one process and resumed: bit for bit


REFUSALS = """
import faulthandler, json, os, sys
faulthandler.dump_traceback_later(240)
from attnres.errors import UserError
from attnres.training import checkpoint, data, from_dict, loop, run_folder, train

first, configs = os.environ["RANK"] == "0", json.loads(sys.argv[1])

def refuse(*_, **__):
    raise UserError("no room")

def refused(values, said):
    try:
        train(from_dict(values), progress=False)
    except UserError as error:
        assert first and said in str(error), error
    except SystemExit as error:
        assert not first and error.code == 2, error
    else:
        raise AssertionError(f"not refused: {said}")

for place, name in (
    (data, "prepare_from"), (run_folder.Output, "open"), (checkpoint, "save"), (loop, "write_json")
):
    before = getattr(place, name)
    if first:
        setattr(place, name, refuse)
    refused(configs[name], "no room")
    setattr(place, name, before)
refused(configs["name"], "expected a plain name")
refused(configs["rate"], "the training has diverged")
"""


@pytest.mark.long
def test_what_is_refused_is_said_by_the_first_process_and_ends_all(configure: Callable[..., TrainConfig]) -> None:
    """By one process alone, or by all of them for the same reason."""
    configs = {
        out: configure(out, parallel={"dp": 2}, steps=4) for out in ("prepare_from", "open", "save", "write_json")
    }
    configs["name"] = configure("name", parallel={"dp": 2}, name="a/b")
    configs["rate"] = configure("rate", parallel={"dp": 2}, optim={"lr": 1e30, "clip": 0.0, "warmup": 0.0})
    arguments = json.dumps({name: to_dict(config) for name, config in configs.items()})
    command = torchrun(2, "--no-python", sys.executable, "-c", REFUSALS, arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.long
def test_leaving_the_group_waits_for_no_thread_that_waits_for_python() -> None:
    """Without the reference that `_leave` holds, one of some hundred times hangs."""
    left = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True)
    assert left.returncode == 0, left.stderr


@pytest.mark.parametrize(("rank", "error"), [("0", UserError), ("1", SystemExit)])
def test_several_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch, rank: str, error: Any) -> None:
    monkeypatch.setattr(parallel, "pick_device", torch.device)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match="is one GPU and torchrun started 2 processes" if rank == "0" else "2"):
        join_processes("cuda:0")


@pytest.mark.parametrize(
    ("name", "value"), [("pp_schedule", "zbv"), ("pp_virtual", 2), ("pp_layers", (1, 1))], ids=lambda value: str(value)
)
def test_what_is_said_of_stages_where_there_are_none_is_refused(
    configure: Callable[..., TrainConfig], name: str, value: Any
) -> None:
    config = configure(parallel={name: value})
    with pytest.raises(UserError, match=rf"parallel.{name} is .* and the layers are not cut into stages: give pp"):
        check(config)


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
    assert rank == "1" or f"no process answers at 127.0.0.1:{port}" in str(refused.value)
    assert rank == "0" or refused.value.code == 2


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 2}, "parallel.tp is 2"),
        ({"cp": 4, "shard": 2}, "parallel.cp is 4"),
        ({"pp": 2, "pp_schedule": "zbv"}, "parallel.pp_schedule is zbv"),
        ({"pp": 2, "pp_schedule": "interleaved_zero_bubble"}, "parallel.pp_schedule is interleaved_zero_bubble"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compiled_is_refused(configure: Callable[..., TrainConfig], layout: Any, said: str) -> None:
    how: dict[str, Any] = {"parallel": layout, "depth_every": 0, "batch_size": 8, "accumulation": 4}
    with pytest.raises(UserError, match="there are 1 processes"):  # nothing else is wrong
        check(configure(**how))
    with pytest.raises(UserError, match=rf"compile is on and {re.escape(said)}\b"):
        check(configure(compile=True, **how))
