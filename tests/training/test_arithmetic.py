"""A resumed run keeps the threads and kernels that it was begun with, and says what it cannot keep."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnres.errors import Interrupted, UserError
from attnres.ops import cpu
from attnres.training import TrainConfig, train
from attnres.training.interrupt import Signals
from attnres.training.parallel import Processes
from attnres.training.prepare import prepare_run
from attnres.training.records import read_metrics
from attnres.training.run import Run

Configure = Callable[..., TrainConfig]


@pytest.fixture
def threads():
    """Torch's number of threads is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, config: TrainConfig) -> None:
    """Train up to `step`, and save there."""
    measure = Run.measure

    def stop(run: Run) -> None:
        measure(run)
        run.steps.signalled = 143 if run.run_state.step == step else 0

    with monkeypatch.context() as patch:
        patch.setattr(Run, "measure", stop)
        with pytest.raises(Interrupted):
            train(config, progress=False)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_threads_and_kernels_stay_those_that_the_run_was_begun_with(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    if cpu.load() is None:
        pytest.skip("no C compiler: there is one way to read alone")
    torch.set_num_threads(1)
    train(configure("whole"), progress=False)
    with cpu.switched(False):
        train(configure("plain"), progress=False)
    assert weights(tmp_path / "whole") != weights(tmp_path / "plain"), "the last bits tell the two apart"

    stop_after(3, monkeypatch, configure("run"))
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    assert state["arithmetic"]["threads"] == 1 and state["arithmetic"]["kernels"] == cpu.version()
    torch.set_num_threads(2)
    with cpu.switched(False):
        train(configure("run", resume=True), progress=False)
        assert cpu.load() is None and torch.get_num_threads() == 2, "put back when the run ends"
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")

    with cpu.switched(False):
        torch.set_num_threads(1)
        stop_after(3, monkeypatch, configure("begun-plain"))
    train(configure("begun-plain", resume=True), progress=False)
    assert weights(tmp_path / "begun-plain") == weights(tmp_path / "plain")
    assert cpu.load() is not None and "ATTNRES_CPU_KERNELS" not in os.environ


@pytest.mark.long
def test_what_cannot_be_kept_is_named_and_allowed_if_asked_for(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(3, monkeypatch, configure())
    path = tmp_path / "run" / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file() and file != path}
    path.write_text(json.dumps(state | {"arithmetic": state["arithmetic"] | {"torch": "1.0", "kernels": "0123"}}))
    message = r"the build of the C kernels \(0123 there, \w+ here\) and torch \(1\.0 there, .* here\); resume"
    with pytest.raises(UserError, match=message):
        train(configure(resume=True), progress=False)
    assert before == {file: file.read_bytes() for file in before}
    assert train(configure(resume=True, allow_different=True), progress=False)["step"] == 8


def test_a_checkpoint_of_an_earlier_version_goes_on(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(3, monkeypatch, configure())
    path = tmp_path / "run" / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    del state["arithmetic"]
    path.write_text(json.dumps(state))
    assert train(configure(resume=True), progress=False)["step"] == 8


@pytest.mark.long
def test_how_the_loss_is_made_is_kept_where_it_was_left_open(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(3, monkeypatch, configure())
    path = tmp_path / "run" / "checkpoint" / "state.json"
    whole = path.read_text()
    assert json.loads(whole)["arithmetic"]["loss"] == "whole"
    path.write_text(whole.replace('"loss": "whole"', '"loss": "chunked"'))  # as of another machine
    with pytest.raises(UserError, match=r"how the loss is made \(chunked there, whole here\); resume"):
        train(configure(resume=True), progress=False)
    begun = {file: file.read_bytes() for file in path.parents[1].rglob("*") if file.is_file()}
    for other in ({"loss": "whole"}, {"accumulation": 2}, {"allow_different": True}):  # asked for, or of another size
        assert train(configure(resume=True, **other), progress=False)["step"] == 8
        shutil.rmtree(tmp_path / "run")
        for file, content in begun.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    path.write_text(whole.replace('"loss": "whole",', ""))  # as of an earlier version
    assert "loss" not in json.loads(path.read_text())["arithmetic"]
    assert train(configure(resume=True), progress=False)["step"] == 8


@pytest.mark.long
def test_a_checkpoint_that_was_being_written_where_the_folder_was_keeps_no_one_from_saving_beside(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sharded model, whose shards are written while training goes on."""

    class Saving:
        def __init__(self, folder: Path, *_: object) -> None:
            self.folder, self.ended = folder, False
            written.append(self)

        def end(self) -> None:
            self.ended = True
            if not self.folder.parent.exists():
                raise UserError(f"cannot write {self.folder}")

        wait = end

    written = list[Saving]()
    run = Run(prepare_run(configure(save_every=1)), Processes(0, 1, torch.device("cpu")), progress=False)
    monkeypatch.setattr(type(run.placed), "whole", False)
    monkeypatch.setattr("attnres.training.checkpoint.ShardedSave", Saving)
    for _ in range(2):
        run.step(Signals())
        run.measure()
        if run.run_state.step == 1:
            run.save()
            shutil.rmtree(tmp_path / "run")
    assert run.output.gone == tmp_path / "run"
    (tmp_path / "run.saved").mkdir(exist_ok=True)
    run.save()
    run.close()
    assert [one.folder.parent.name for one in written] == ["run", "run.saved"] and all(one.ended for one in written)


@pytest.mark.long
@pytest.mark.parametrize("what", ["removed", "renamed", "metrics", "lock"])
def test_a_folder_that_is_taken_away_is_noticed_and_the_run_saved_beside(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    train(configure("whole"), progress=False)
    folder, measure = tmp_path / "run", Run.measure

    def take_away(run: Run) -> None:
        measure(run)
        if run.run_state.step == 5 and run.output.gone is None:
            if what == "removed":
                shutil.rmtree(folder)
            elif what == "renamed":
                folder.rename(tmp_path / "elsewhere")
            else:
                (folder / {"metrics": "metrics.jsonl", "lock": ".lock"}[what]).unlink()

    monkeypatch.setattr(Run, "measure", take_away)
    with pytest.raises(UserError, match=r"run was removed or renamed, .* up to step 6 is saved in .*run\.saved, where"):
        train(configure(), progress=False)
    monkeypatch.undo()
    assert folder.exists() is (what in ("metrics", "lock"))
    train(configure("run.saved", resume=True), progress=False)
    assert weights(tmp_path / "run.saved") == weights(tmp_path / "whole")
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run.saved", "whole")]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
