"""What a finished run says of the model's inside."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from attnres.data import load_tokenizer, prepare
from attnres.data.batches import held_out_starts
from attnres.inspect import record
from attnres.inspect.inspection import Inspection
from attnres.inspect.kinds import KINDS
from attnres.models import load
from attnres.training import TrainConfig, train
from attnres.training.data import held_out, prepare_from
from attnres.training.inspection import _labels, write_inspection

Configure = Callable[..., TrainConfig]

CODE = '''def add(first, second):
    """Both together."""
    return first + second


total = add(1, 2)
'''


def test_a_run_writes_what_its_model_does_inside(configure: Configure, tmp_path: Path) -> None:
    train(configure(steps=4), progress=False)
    stored = Inspection.load(tmp_path / "run" / "inspection.json")
    assert stored.model["name"] == "block-seed0" and stored.data["kind"] == "prose"
    assert (stored.data["windows"], stored.data["tokens"]) == (6, 96)
    assert stored.kinds is not None and set(stored.kinds["names"]) <= set(KINDS["prose"])
    assert sum(stored.kinds["tokens"]) > 80
    assert stored.example is not None and "".join(stored.example["tokens"]) == stored.example["text"]
    assert stored.dynamics is not None and stored.dynamics["steps"] == [4] and "entropy" in stored.dynamics


def test_weights_are_means_over_the_windows_of_validation(configure: Configure, tmp_path: Path) -> None:
    config = configure(steps=4)
    train(config, progress=False)
    routing = Inspection.load(tmp_path / "run" / "inspection.json").routing
    windows = held_out(prepare_from(config.data), config.data)
    model = load(tmp_path / "run" / "model").eval()
    with torch.no_grad(), record(model) as trace:
        model(input_ids=windows[:, :-1], use_cache=False)
    assert trace.routing is not None and routing is not None and routing["sources"] == trace.routing["sources"]
    for row, expected in zip(routing["weights"], trace.routing["weights"], strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("standard")
@pytest.mark.parametrize("residual", ["standard", "deepnorm"])
def test_a_residual_without_a_softmax_has_an_inspection(configure: Configure, tmp_path: Path, residual: str) -> None:
    config = configure(steps=2)
    config.model.residual, config.model.num_blocks = residual, None
    train(config, progress=False)
    stored = Inspection.load(tmp_path / "run" / "inspection.json")
    assert (stored.mixing is None) == (residual == "deepnorm")
    if stored.mixing is not None:
        np.testing.assert_allclose(stored.mixing, np.tril(np.ones((5, 5))))


@pytest.mark.long
def test_a_resumed_run_writes_it_as_an_uninterrupted_one(configure: Configure, tmp_path: Path) -> None:
    train(configure(out="whole"), progress=False)
    train(configure(out="parts"), progress=False)
    (tmp_path / "parts" / "summary.json").unlink()
    (tmp_path / "parts" / "inspection.json").unlink()
    config = configure(out="parts")
    config.resume = True
    train(config, progress=False)
    whole, parts = (Inspection.load(tmp_path / name / "inspection.json") for name in ("whole", "parts"))
    assert parts == whole


def test_tokens_have_the_kind_that_their_place_in_the_document_gives(tmp_path: Path) -> None:
    """A window that begins inside a string is read as one, and two documents are told apart."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(CODE.replace("total", f"total_{i}"))
    prepared = prepare(str(texts), "bpe:300", out=tmp_path / "tokens", held_out=0.5, progress=False)
    tokens, tokenizer = prepared.tokens("val"), load_tokenizer(prepared.path)
    begins = tokens.document_starts().astype(int)
    start = int(begins[0])
    inside = next(i for i in range(60) if '"""Both' in tokenizer.decode(tokens[start : start + i].tolist()))
    labels = _labels(tokens, start, [start + inside], 200, tokenizer, "code")
    ids = tokens[start + inside : start + inside + 200]
    names = [KINDS["code"][label] if label >= 0 else "none" for label in labels]
    assert names[0] == "docstring"
    end = int(np.flatnonzero(ids == tokens.eos_id)[0])
    assert names[end] == "none" and names[end + 1] == "statement start"
    returns = [i for i, token in enumerate(ids[:end]) if tokenizer.decode([int(token)]).strip() == "return"]
    assert all(names[i] == "statement start" for i in returns)


@pytest.mark.long
def test_what_is_far_from_its_documents_beginning_has_no_kind(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = configure(steps=2)
    train(config, progress=False)
    monkeypatch.setattr("attnres.training.inspection.LOOK_BACK", -1)
    prepared, model = prepare_from(config.data), load(tmp_path / "run" / "model")
    far = tmp_path / "far"
    far.mkdir()
    write_inspection(far, model, prepared, config.data, name=None, cast=nullcontext, rows=4)
    assert Inspection.load(far / "inspection.json").kinds is None
    assert model.training is False


def test_windows_begin_where_validation_reads(configure: Configure) -> None:
    config = configure()
    prepared = prepare_from(config.data)
    tokens, windows = prepared.tokens("val"), held_out(prepared, config.data)
    starts = held_out_starts(tokens, 16, 6)
    assert [tokens[start : start + 17].tolist() for start in starts] == windows.tolist()
