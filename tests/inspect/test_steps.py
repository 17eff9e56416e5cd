"""What changed between two steps of a run: against queries that were made, and from the files of a run."""

import math

import pytest
import torch
from sample_mechanisms import crossed
from tiny import NARROW

from attnres import UserError
from attnres.files import write_json
from attnres.inspect.steps import between, step_change
from attnres.models import build
from attnres.models.model_files import LIGHT, residual_at, snapshots, tensors_of, write_snapshot
from attnres.residuals import make_residual


def residual_of(width, *rows):
    """Full reads whose queries are the given vectors, with gains of one."""
    residual = make_residual("full", len(rows) - 1, width)
    with torch.no_grad():
        residual.query.copy_(torch.tensor(rows))
    return residual


def test_a_query_turns_by_the_angle_that_it_was_turned_by_and_sharpens_by_its_length():
    first = residual_of(2, [0.0, 0.0], [1.0, 0.0], [0.0, 2.0])
    last = residual_of(2, [0.0, 0.0], [math.cos(0.5), math.sin(0.5)], [0.0, -3.0])
    change = step_change(first, last, (10, 20))
    assert change.turned == [None, pytest.approx(math.cos(0.5)), pytest.approx(-1.0)]
    assert change.before == pytest.approx([0.0, math.sqrt(2), 2 * math.sqrt(2)])
    assert change.after == pytest.approx([0.0, math.sqrt(2), 3 * math.sqrt(2)])
    assert (change.first, change.last, change.reads) == (10, 20, ["attention 0", "mlp 0", "output"])
    assert change.to_dict()["turned"] == change.turned and "step 10 to 20" in repr(change)
    assert list(change.frame()["after"]) == change.after and "L0 MLP" in change._repr_html_()


@pytest.mark.parametrize("name", crossed())
def test_what_every_mechanism_learned_between_two_steps_is_told(name):
    first, last = make_residual(name, 4, 8), make_residual(name, 4, 8)
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.add_(0.5)
    change = step_change(first, last, (0, 1))
    assert all(math.isfinite(moved) for moved in change.tables.values()) and change.to_dict()


def test_what_is_learned_besides_queries_says_its_largest_change():
    first, last = (make_residual("denseformer", 4, 8) for _ in range(2))
    with torch.no_grad():
        next(iter(last.parameters())).view(-1)[0] += 0.75
    change = step_change(first, last, (0, 1))
    assert max(change.tables.values()) == pytest.approx(0.75)
    assert set(change.turned) == set(change.before) == {None}


@pytest.fixture
def run(tmp_path, folder_of):
    """A finished run's folder with snapshots of three steps, whose queries grow."""
    folder = tmp_path / "run"
    (folder / "model").parent.mkdir()
    (folder / "model").symlink_to(folder_of("full"))
    write_json(folder / "summary.json", {"step": 8})
    (folder / "metrics.jsonl").write_text("")
    from attnres.models import load

    tensors = tensors_of(load(folder).residual)
    for step in (0, 4, 8):
        write_snapshot(folder, step, tensors | {"query": tensors["query"] * step / 8})
    return folder


def test_snapshots_of_a_run_are_compared_by_step(run):
    assert list(snapshots(run)) == [0, 4, 8]
    change = between(run, 4)
    assert (change.first, change.last) == (4, 8)
    assert change.turned[1:] == pytest.approx([1.0] * 6)
    assert [2 * value for value in change.before] == pytest.approx(change.after)
    assert between(run, 0, 4).turned == [None] * 7
    with pytest.raises(UserError, match=r"no snapshot of its residual at step 5: expected one of its .* 0, 4, 8"):
        between(run, 5)
    with pytest.raises(UserError, match=r"step 8 of .* is not before step 8: expected .* one of its .* 0, 4, 8"):
        between(run, 8)
    with pytest.raises(UserError, match="is no run's folder"):
        between((run / "model").resolve(), 4)


def test_snapshots_that_are_damaged_or_of_another_residual_are_refused(run):
    whole, path = {name: torch.zeros(7, 32) for name in ("query", "gain")}, snapshots(run)[4]
    for tensors, message in (
        ({"query": torch.zeros(2, 2)}, "it holds query, expected gain, query"),
        ({name: value * math.nan for name, value in whole.items()}, "has numbers that are not finite"),
        ({name: value[1:] for name, value in whole.items()}, r"is \(6, 32\), expected \(7, 32\)"),
    ):
        write_snapshot(run, 4, tensors)
        with pytest.raises(UserError, match=message):
            between(run, 4)
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(UserError, match="cannot be read"):
        between(run, 4)
    config = build(NARROW, "full", vocab_size=9, max_positions=8).config
    with pytest.raises(UserError, match="is no snapshot of residual 'full'"):
        residual_at(config, snapshots(run)[8])


def test_a_residual_that_has_a_matrix_a_read_is_not_light():
    small = make_residual("full", 4, 64, query="input")
    assert set(tensors_of(small)) == {"query", "gain", "weighting.query_weight"}
    with torch.device("meta"):
        large = make_residual("full", 24, 512, query="input")
    assert sum(one.numel() for one in large.parameters()) * 4 > LIGHT and tensors_of(large) == {}
    assert tensors_of(make_residual("standard", 4, 64)) == {}
