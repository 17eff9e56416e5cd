"""Rates carried from one width to another: the coordinate check of muP, and what it says exactly."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import SIZE

from attnres import load
from attnres.errors import UserError
from attnres.models import build
from attnres.training import TrainConfig, train
from attnres.training.config import OptimConfig, from_dict
from attnres.training.optim import Transfer, build_optimizers, carry_start, kinds
from attnres.training.prepare import check

WIDTHS = (32, 64, 128, 256)


def model_of(width: int, base_width: int | None, residual: str = "full", family: str = "qwen3", **fields: Any) -> Any:
    size = {
        "family": family,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "head_dim": 16,
        "intermediate_size": 2 * width,
        **fields,
    }
    model = build(size, residual, vocab_size=64, max_positions=32)
    carry_start(model, base_width, kinds(model))
    return model.train()


def moved(model: Any, optim: OptimConfig, steps: int = 4) -> float:
    """How far the logits go in a few steps, root mean square."""
    optimizers = build_optimizers(model, optim)
    ids = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(1))
    x, y = ids[:, :-1], ids[:, 1:]
    first = model(input_ids=x, use_cache=False).logits.detach()
    for _ in range(steps):
        logits = model(input_ids=x, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float((model(input_ids=x, use_cache=False).logits - first).square().mean().sqrt())


@pytest.mark.quick("True-adamw")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_does_as_much_at_every_width(optimizer: Any, tied: bool) -> None:
    """The coordinate check: with the rates as they are a step moves the logits by more the wider the model is."""
    slopes = {}
    for base in (None, 32):
        optim = OptimConfig(optimizer=optimizer, lr=0.01, muon_lr=0.01, base_width=base)
        distances = [moved(model_of(width, base, tie_word_embeddings=tied), optim) for width in WIDTHS]
        slopes[base] = np.polyfit(np.log(WIDTHS), np.log(distances), 1)[0]
    assert slopes[None] > 0.4 and abs(slopes[32]) < 0.2, slopes


@pytest.mark.parametrize(("family", "fields"), [("qwen3", {}), ("gemma", {"hidden_act": "gelu_pytorch_tanh"})])
def test_logits_are_divided_by_the_ratio(family: str, fields: dict[str, Any]) -> None:
    """Also where the gain is stored as what is added to one."""
    wide, carried = (model_of(64, base, "standard", family, **fields) for base in (None, 16))
    matrices = set(kinds(wide)["matrix"])
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if name in matrices:
                parameter /= 2  # the root of 64 / 16
    ids = torch.arange(20)[None]
    torch.testing.assert_close(carried(input_ids=ids).logits, wide(input_ids=ids).logits / 4)


def test_rates_and_decays_by_what_a_parameter_is() -> None:
    model = model_of(64, 16, "full", tie_word_embeddings=False)
    optim = OptimConfig(optimizer="muon", lr=0.1, muon_lr=0.2, residual_lr=0.1, weight_decay=0.3, base_width=16)
    rates = {
        name.rpartition("model.")[2]: (group["peak_lr"], group["weight_decay"])
        for optimizer in build_optimizers(model, optim)
        for group in optimizer.param_groups
        for name in group["names"]
    }
    assert rates["residual.query"] == (pytest.approx(0.1 / 4), 0)
    assert rates["norm.weight"] == (pytest.approx(0.1 / 4), 0)
    for name in ("residual.gain", "embed_tokens.weight", "layers.0.input_layernorm.weight"):
        assert rates[name] == (0.1, 0)
    assert rates["lm_head.weight"] == (0.1, 0.3)
    assert rates["layers.1.mlp.down_proj.weight"] == (pytest.approx(0.2 / 2), pytest.approx(0.3 * 2))
    adamw = dataclasses.replace(optim, optimizer="adamw")
    (group,) = [group for group in build_optimizers(model, adamw)[0].param_groups if group["kind"] == "matrix"]
    assert (group["peak_lr"], group["weight_decay"]) == (pytest.approx(0.1 / 4), pytest.approx(0.3 * 4))


def test_the_same_width_is_the_same_model() -> None:
    plain, carried = model_of(32, None), model_of(32, 32)
    assert Transfer.of(carried, 32).ratio == 1
    for ours, theirs in zip(plain.parameters(), carried.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.long
def test_a_run_carries_its_rates_and_saves_a_model_of_its_family(tmp_path: Any) -> None:
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"Some text {i} of a few words, again and again. " * 20)
    values = {
        "model": {"size": SIZE, "residual": "full"},
        "data": {"source": str(tmp_path / "text"), "seq_len": 16, "tokenizer": "bpe:300", "val_windows": 4},
        "optim": {"base_width": 8, "lr": 0.01},
        "steps": 3,
        "batch_size": 2,
        "out": str(tmp_path / "run"),
    }
    config = from_dict(values)
    losses = [train(config, progress=False)["val_loss"]]
    again = from_dict(values | {"out": str(tmp_path / "again"), "optim": {"base_width": None, "lr": 0.01}})
    losses.append(train(again, progress=False)["val_loss"])
    assert losses[0] != losses[1] and all(map(math.isfinite, losses))
    model = load(tmp_path / "run" / "model")
    gain = model.model.norm.weight
    assert gain.mean().item() == pytest.approx(0.25, abs=0.02)  # it learns at a quarter of the rate as well


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"base_width": 0}}, "optim.base_width is 0: it must be a number above 0"),
        (
            {"optim": {"base_width": 64}, "finetune": {"init_from": "somewhere"}},
            "optim.base_width is 64 and the model is somewhere: it transfers learning rates",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(from_dict(values, TrainConfig()))
