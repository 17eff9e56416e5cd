"""A checkpoint that is damaged, foreign or of another run is refused; one that cannot be written leaves the last."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from attnres.errors import UserError
from attnres.training import TrainConfig, checkpoint, train
from attnres.training.checkpoint import export_weights, random_state, set_random_state
from attnres.training.parallel import Processes
from attnres.training.prepare import prepare_run
from attnres.training.run import Run

Configure = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `stopped` trains once."""
    return tmp_path_factory.mktemp("killed") / "run"


@pytest.fixture
def stopped(configure: Configure, killed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run of 8 steps whose last checkpoint is of step 4, killed without warning after step 5."""

    class Killed(BaseException):
        pass

    measure = Run.measure

    def kill(run: Run) -> None:
        measure(run)
        if run.run_state.step == 5:
            raise Killed

    if not killed.exists():
        with monkeypatch.context() as patch:
            patch.setattr(Run, "measure", kill)
            with pytest.raises(Killed):
                train(configure(str(killed)), progress=False)
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run" / "checkpoint"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def change_state(folder: Path, **values: Any) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | values))


def change_progress(folder: Path, **values: Any) -> None:
    change_state(folder, progress=json.loads((folder / "state.json").read_text())["progress"] | values)


def change_model(folder: Path, **values: Any) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "optimizer.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "optimizer.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated optimizer": (lambda c: truncate(c / "optimizer.safetensors"), "cannot load the optimizer state"),
    "flipped bit in the optimizer": (lambda c: flip(c / "optimizer.safetensors"), "not those that were saved"),
    "tensor lost": (lose_a_tensor, "not those that were saved"),
    "optimizer missing": (lambda c: (c / "optimizer.safetensors").unlink(), "cannot load the optimizer state"),
    "truncated model": (lambda c: truncate(c / "model" / "model.safetensors"), "cannot load the model"),
    "flipped bit in the model": (lambda c: flip(c / "model" / "model.safetensors"), "not those that were saved"),
    "model missing": (lambda c: shutil.rmtree(c / "model"), "cannot load the model"),
    "truncated state": (lambda c: truncate(c / "state.json"), "not valid JSON"),
    "state missing": (lambda c: (c / "state.json").unlink(), "cannot read .*state.json"),
    "foreign state": (
        lambda c: change_state(c, format="other"),
        r"is not a checkpoint of attnres \(expected format attnres-checkpoint-1 or attnres-checkpoint-shares-1 in",
    ),
    "state without progress": (
        lambda c: (c / "state.json").write_text('{"format": "attnres-checkpoint-1"}'),
        "is damaged",
    ),
    "progress of another form": (lambda c: change_state(c, progress={"pace": 1}), "cannot go on from .*pace"),
    "progress of another step": (lambda c: change_state(c, step=3), "cannot go on from"),
    "progress that is no number": (lambda c: change_progress(c, losses=["a"]), "cannot go on from"),
    "random state of another form": (lambda c: change_state(c, random=[{"python": 3}]), "cannot go on from"),
    "random state no list": (lambda c: change_state(c, random=7), "random is 7: expected a list"),
    "no checksums": (lambda c: change_state(c, checksums={}), "not those that were saved"),
    "another residual": (lambda c: change_model(c, residual="full", residual_settings={}), "has the residual full"),
    "another number of blocks": (lambda c: change_model(c, residual_settings={"num_blocks": 4}), "'num_blocks': 4"),
    "other data": (lambda c: change_state(c, data={}), "was trained on other data"),
}


@pytest.mark.quick("truncated model", "model missing", "other data", "random state no list", "* state", "state *")
@pytest.mark.parametrize(("harm", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_checkpoint_that_is_not_whole_is_refused(
    configure: Configure, stopped: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(stopped)
    before = (stopped.parent / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=message):
        train(configure(resume=True), progress=False)
    assert (stopped.parent / "metrics.jsonl").read_bytes() == before


def test_another_configuration_is_refused_naming_the_difference(configure: Configure, stopped: Path) -> None:
    with pytest.raises(UserError, match=r"another configuration: optim.lr is 0.5 here, 0.01 there; seed is 3 here, 0"):
        train(configure(resume=True, optim={"lr": 0.5}, seed=3), progress=False)
    (stopped.parent / "config.json").unlink()
    with pytest.raises(UserError, match="is not empty and holds other files"):
        train(configure(resume=True), progress=False)
    assert checkpoint.FORMAT in (stopped / "state.json").read_text()


def test_the_checkpoint_itself_knows_its_configuration(configure: Configure, stopped: Path) -> None:
    state = json.loads((stopped / "state.json").read_text())
    state["config"]["optim"]["lr"] = 0.5
    change_state(stopped, config=state["config"])
    with pytest.raises(UserError, match=r"the checkpoint .* belongs to another configuration: optim.lr is 0.01 here"):
        train(configure(resume=True), progress=False)


@pytest.mark.quick("save_file")
@pytest.mark.parametrize("where", ["save_model", "save_file", "fsync"])
def test_a_full_disk_keeps_the_checkpoint_before(
    configure: Configure, stopped: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: object) -> None:
        if where == "save_file":
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    def content() -> dict[str, bytes]:
        return {str(p.relative_to(stopped)): p.read_bytes() for p in stopped.rglob("*") if p.is_file()}

    before = content()
    run = Run(prepare_run(configure(resume=True)), Processes(0, 1, torch.device("cpu")), progress=False)
    monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (checkpoint, where)), full)
    with pytest.raises(UserError, match="No space left on device"):
        run.save()
    monkeypatch.undo()
    run.close()
    assert content() == before
    assert [path.name for path in stopped.parent.iterdir() if path.name.startswith(".")] == []
    assert train(configure(resume=True), progress=False)["step"] == 8


def start(config: TrainConfig) -> Run:
    return Run(prepare_run(config), Processes(0, 1, torch.device("cpu")), progress=False)


def test_a_folder_that_is_not_empty_is_said_before_a_checkpoint_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "shares").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    with pytest.raises(UserError, match="out is not empty and holds other files"):
        export_weights(str(tmp_path), str(tmp_path / "out"))


def test_queries_are_resumed_as_they_were_saved(configure: Configure, stopped: Path) -> None:
    saved = load_file(stopped / "model" / "model.safetensors")
    run = start(configure(resume=True))
    run.close()
    query = run.model.get_parameter("residual.query").detach()
    assert query.any() and torch.equal(query, saved["model.residual.query"])


@pytest.mark.long
@pytest.mark.parametrize("residual", ["block", "full"])
def test_queries_of_a_run_saved_before_its_first_step_are_zero_when_resumed(
    configure: Configure, residual: str
) -> None:
    values = {"model": {"residual": residual, "num_blocks": 2 if residual == "block" else None}}
    run = start(configure(**values))
    run.save()
    run.close()
    resumed = start(configure(resume=True, **values))
    resumed.close()
    assert resumed.saved == 0 and not resumed.model.get_parameter("residual.query").any()
    assert checkpoint.checksum(resumed.model.named_parameters()) == checkpoint.checksum(run.model.named_parameters())


def test_random_states_come_back() -> None:
    state = json.loads(json.dumps(random_state(torch.device("cpu"))))

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    first = draw()
    set_random_state(state, torch.device("cpu"))
    assert draw() == first
