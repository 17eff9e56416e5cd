"""A run that goes on with reads as at the start: what was set back, and that nothing else was."""

from pathlib import Path

import pytest
import reset
import torch
from safetensors.torch import load_file

from attnres.errors import UserError
from attnres.models import load
from attnres.training.checkpoint import kept


@pytest.mark.quick("reads0")
@pytest.mark.parametrize("reads", [(1, 2), None])
def test_queries_begin_again_and_all_else_goes_on(run: Path, tmp_path: Path, reads: tuple[int, ...] | None) -> None:
    reset.main(run, step=4, out=tmp_path / "on", reads=reads, residual_lr=1e-12)
    before = load(kept(run, 4) / "model").state_dict()
    after = load(tmp_path / "on" / "model").state_dict()
    rows = range(len(before["model.residual.query"])) if reads is None else reads
    for row, query in enumerate(after["model.residual.query"]):
        expected = torch.zeros_like(query) if row in rows else before["model.residual.query"][row]
        torch.testing.assert_close(query, expected, atol=1e-9, rtol=0)
    assert all(torch.allclose(after["model.residual.gain"][row], torch.ones(())) for row in rows)
    weights = [name for name in before if "residual." not in name]
    assert all(not torch.equal(before[name], after[name]) for name in weights)
    losses = [(folder / "val" / "000004.npy").read_bytes() for folder in (run, tmp_path / "on")]
    assert losses[0] == losses[1]


@pytest.mark.long
def test_with_nothing_set_back_the_run_is_the_same(run: Path, tmp_path: Path) -> None:
    reset.main(run, step=4, out=tmp_path / "on", reads=())
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (run, tmp_path / "on"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_read_that_is_not_there_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--reads 99: the model has reads 0 to"):
        reset.main(run, step=4, out=tmp_path / "on", reads=(99,))
    with pytest.raises(UserError, match="kept no checkpoint of step 5"):
        reset.main(run, step=5, out=tmp_path / "on")
    assert not (tmp_path / "on").exists()
