"""A model with dropout: a run goes on with the numbers that it would have drawn, and is measured without it."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lines import lines
from safetensors.torch import load_file
from torch.nn import functional as F

from attnres.errors import Interrupted
from attnres.models import load
from attnres.training import TrainConfig, train
from attnres.training.parallel import Processes
from attnres.training.prepare import prepare_run
from attnres.training.run import Run

Configure = Callable[..., TrainConfig]
DROPOUT = {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.3, "attn_pdrop": 0.3}


@pytest.fixture
def dropping(configure: Configure) -> Configure:
    """Makes the configuration of a run of four steps with dropout."""

    def make(out: str = "run", **values: Any) -> TrainConfig:
        return configure(out=out, **{"model": {"size": DROPOUT}, "steps": 4, "log_every": 1, **values})

    return make


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.long
def test_a_stopped_run_draws_what_it_would_have_drawn(
    dropping: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(dropping("whole"), progress=False)
    measure = Run.measure

    def stop(run: Run) -> None:
        measure(run)
        if run.run_state.step == 2:
            run.steps.signalled = 128 + signal.SIGTERM

    with monkeypatch.context() as patch:
        patch.setattr(Run, "measure", stop)
        with pytest.raises(Interrupted):
            train(dropping("parts"), progress=False)
    torch.manual_seed(9)  # as in another process
    train(dropping("parts", resume=True), progress=False)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
def test_held_out_text_is_measured_without_dropout(dropping: Configure, tmp_path: Path) -> None:
    summary = train(dropping(), progress=False)
    run = Run(prepare_run(dropping("other")), Processes(0, 1, torch.device("cpu")), progress=False)
    run.close()
    model = load(tmp_path / "run" / "model")
    measured = []
    for training in (False, True):
        with torch.no_grad():
            logits = model.train(training)(input_ids=run.windows[:, :-1]).logits
        measured.append(F.cross_entropy(logits.flatten(0, 1), run.windows[:, 1:].flatten()).item())
    assert summary["val_loss"] == pytest.approx(measured[0], rel=1e-5)
    assert measured[1] != pytest.approx(measured[0], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("how", ["layer", "sublayer"])
def test_what_is_made_again_drops_the_same(dropping: Configure, tmp_path: Path, how: str) -> None:
    for kept in ("none", how):
        train(dropping(kept, gradient_checkpointing=kept), progress=False)
    assert losses(tmp_path / how) == pytest.approx(losses(tmp_path / "none"), rel=1e-6)
    torch.testing.assert_close(weights(tmp_path / how), weights(tmp_path / "none"), rtol=0, atol=1e-5)
