"""Parameters are grouped by what they are."""

import itertools
from typing import Any

import pytest
import torch
from test_families import fields_of
from tiny import NARROW
from torch import nn

from attnres import attach
from attnres.models import FAMILIES, build
from attnres.models.classes import CLASSES
from attnres.training.config import OptimConfig
from attnres.training.optim import (
    OF_RESIDUAL,
    build_optimizers,
    kinds,
    load_state_tensors,
    set_learning_rate,
    state_tensors,
)

GPT2 = {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}


def model_of(size: dict[str, Any], residual: str = "full") -> Any:
    return build(size=size, residual=residual, vocab_size=50, max_positions=16)


@pytest.mark.parametrize(
    "size", [NARROW, GPT2, {**NARROW, "tie_word_embeddings": False}], ids=["qwen3", "gpt2", "untied"]
)
@pytest.mark.parametrize("residual", ["standard", "full", "hyper_connections", "denseformer"])
def test_every_parameter_has_one_kind(size: dict[str, Any], residual: str) -> None:
    model = model_of(size, residual)
    parameters, groups = dict(model.named_parameters()), kinds(model)
    assert sorted(itertools.chain(*groups.values())) == sorted(parameters)
    own = {id(parameters[name]) for kind in OF_RESIDUAL for name in groups[kind]}
    assert own == {id(p) for p in model.residual.parameters()}
    assert all(parameters[name].ndim < 2 for name in groups["vector"])
    assert all(parameters[name].ndim == 2 for name in groups["matrix"])
    assert len(groups["matrix"]) == (8 if size is GPT2 else 14)
    assert len(groups["embedding"]) == (2 if size is GPT2 else 1)
    assert len(groups["head"]) == (0 if size.get("tie_word_embeddings", True) else 1)


def test_a_residual_is_known_wherever_it_is() -> None:
    """Attached to a part of a model, and in a wrapper as DistributedDataParallel is one."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    attach(encoder, "full")
    for model, home in (
        (nn.ModuleDict({"embedding": nn.Embedding(10, 16), "encoder": encoder}), "encoder.residual"),
        (nn.ModuleDict({"module": model_of(NARROW)}), "module.model.residual"),
    ):
        assert set(kinds(model)["read"]) == {f"{home}.query", f"{home}.gain"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_of_every_family_matrices_alone_are_decayed_and_orthogonalised(family: str) -> None:
    """Biases of experts are a tensor of two dimensions, and what decays a state may have four."""
    cls = CLASSES[family][1].plain_class
    with torch.device("meta"):
        model = cls(cls.config_class(**fields_of(family)))
    groups = kinds(model)
    last = {name.rpartition(".")[2] for name in groups["matrix"]}
    assert last <= {"weight", "gate_up_proj", "down_proj"}
    optimizers = build_optimizers(model, OptimConfig(optimizer="muon", weight_decay=0.3))
    decayed = {
        name for one in optimizers for group in one.param_groups if group["weight_decay"] for name in group["names"]
    }
    assert decayed == {*groups["matrix"], *groups["head"]}


def test_queries_and_gains_are_neither_decayed_nor_orthogonalised() -> None:
    model = model_of(NARROW)
    adamw, muon = build_optimizers(model, OptimConfig(optimizer="muon", weight_decay=0.3))
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, torch.optim.Muon)
    by_kind = {group["kind"]: group for group in adamw.param_groups}
    assert {id(p) for p in by_kind["read"]["params"]} == {id(p) for p in model.residual.parameters()}
    assert {kind: group["weight_decay"] for kind, group in by_kind.items()} == dict.fromkeys(by_kind, 0.0)
    assert [(group["kind"], group["weight_decay"], group["lr"]) for group in muon.param_groups] == [
        ("matrix", 0.3, 2e-3)
    ]


def test_adamw_decays_matrices_only() -> None:
    (adamw,) = build_optimizers(model_of({**NARROW, "tie_word_embeddings": False}), OptimConfig(weight_decay=0.3))
    decays = {group["kind"]: group["weight_decay"] for group in adamw.param_groups}
    assert decays == {"read": 0.0, "vector": 0.0, "embedding": 0.0, "head": 0.3, "matrix": 0.3}
    assert adamw.defaults["fused"]


@pytest.mark.parametrize(
    ("residual", "settings", "tenths"),
    [
        ("full", {"query": "input"}, {"query", "gain", "weighting.query_weight"}),
        ("boundary", {}, {"query", "gain"}),
        ("lr_attnres", {"rank": 2}, set()),  # its logits are divided, and inkling2's
        ("inkling2", {}, set()),
        ("keel", {}, set()),  # a gain of a norm
        ("denseformer", {}, set()),
    ],
)
def test_what_chooses_trains_at_a_tenth_of_the_rate(residual, settings, tenths):
    model = build(NARROW, residual, settings=settings, vocab_size=32, max_positions=16)
    (adamw,) = build_optimizers(model, OptimConfig(lr=0.1))
    slow = [name for group in adamw.param_groups if group["lr"] == pytest.approx(0.01) for name in group["names"]]
    assert {name.partition("residual.")[2] for name in slow} == tenths


def test_each_optimizer_is_scaled_from_its_own_peak() -> None:
    optimizers = build_optimizers(model_of(NARROW), OptimConfig(optimizer="muon", lr=0.1, muon_lr=0.4, residual_lr=0.1))
    set_learning_rate(optimizers, 0.5)
    assert [{group["lr"] for group in optimizer.param_groups} for optimizer in optimizers] == [{0.05}, {0.2}]


def step(model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    model(input_ids=torch.arange(16)[None]).logits.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_goes_through_flat_tensors_bit_for_bit(name: str) -> None:
    config = OptimConfig(optimizer=name)  # ty: ignore[invalid-argument-type]
    model, copy = model_of(NARROW), model_of(NARROW)
    optimizers, others = build_optimizers(model, config), build_optimizers(copy, config)
    step(model, optimizers)
    copy.load_state_dict(model.state_dict())
    load_state_tensors(others, {name: tensor.clone() for name, tensor in state_tensors(optimizers).items()})
    step(model, optimizers)
    step(copy, others)
    ours, theirs = state_tensors(optimizers), state_tensors(others)
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters()))


def test_state_of_other_parameters_is_refused() -> None:
    model = model_of(NARROW)
    optimizers = build_optimizers(model, OptimConfig())
    step(model, optimizers)
    state = state_tensors(optimizers)
    with pytest.raises(KeyError, match="foreign"):
        load_state_tensors(build_optimizers(model, OptimConfig()), {**state, "foreign::exp_avg": torch.zeros(1)})
    name = next(key for key in state if key.endswith("exp_avg"))
    with pytest.raises(ValueError, match="has shape"):
        load_state_tensors(build_optimizers(model, OptimConfig()), {**state, name: torch.zeros(1)})


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_queries_are_decayed_on_request(decay):
    model = model_of(NARROW, "block")
    with torch.no_grad():
        model.residual.query.fill_(1.0)
    (adamw,) = build_optimizers(model, OptimConfig(lr=0.5, residual_lr=0.5, residual_decay=decay))
    set_learning_rate([adamw], 0.8)
    for group in adamw.param_groups:
        assert group["lr"] == pytest.approx(0.5 * 0.8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    torch.testing.assert_close(model.residual.query, torch.full_like(model.residual.query, 1 - 0.4 * decay))
    assert torch.equal(model.residual.gain, torch.ones_like(model.residual.gain))
