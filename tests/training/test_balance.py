"""Experts' loads: the two rules against brute force, and a collapse that they prevent."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lines import lines
from tiny import KIMI
from transformers import DeepseekV3Config, KimiLinearConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE, KimiLinearTopkRouter

from attnres.errors import UserError
from attnres.training import TrainConfig, balance, train
from attnres.training.balance import BINS, Balancer

EXPERTS, CHOSEN, WIDTH = 8, 2, 16
ONE: Any = SimpleNamespace(sum=lambda values: values)
SIZE = {
    **KIMI,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
}


def config(**fields: Any) -> KimiLinearConfig:
    names = {name: value for name, value in SIZE.items() if name != "family"}
    return KimiLinearConfig(**{**names, **fields}, vocab_size=32, pad_token_id=None)


def skewed(seed: int = 0) -> tuple[KimiLinearTopkRouter, torch.Tensor]:
    """A router and tokens of which all prefer the same experts. Dyadic numbers: their products are exact."""
    draw = torch.Generator().manual_seed(seed)
    router = KimiLinearTopkRouter(config()).train()
    with torch.no_grad():
        noise = torch.randint(-8, 9, (EXPERTS, WIDTH), generator=draw) / 64
        router.weight.copy_(noise + torch.linspace(-0.125, 0.125, EXPERTS).mul(64).round().div(64)[:, None])
        router.e_score_correction_bias.copy_(torch.randint(-2, 3, (EXPERTS,), generator=draw) / 16)
    return router, 1 + torch.randint(-8, 9, (300, WIDTH), generator=draw) / 8


def test_the_quantile_rule_is_the_formula_within_a_bin() -> None:
    router, x = skewed()
    balancer, before = Balancer(router, "quantile", ONE), router.e_score_correction_bias.clone()
    with torch.no_grad():
        scores = router(x)[0].sigmoid()
    thresholds = (scores + before).sort(-1, descending=True).values[:, CHOSEN]
    expected = torch.stack([(thresholds - scores[:, j]).quantile(CHOSEN / EXPERTS) for j in range(EXPERTS)])
    balancer.update()
    width = (before.max() - before.min() + 2) / BINS
    torch.testing.assert_close(
        router.e_score_correction_bias, expected - expected.mean(), rtol=0, atol=2.5 * width.item()
    )


def test_the_sign_rule_moves_each_bias_by_one_rate_towards_the_mean_load() -> None:
    router, x = skewed()
    balancer, before = Balancer(router, "sign", ONE), router.e_score_correction_bias.clone()
    with torch.no_grad():
        loads = router(x)[2].flatten().bincount(minlength=EXPERTS).double()
    balancer.update()
    moved = router.e_score_correction_bias - before
    torch.testing.assert_close(moved, balance.RATE * (loads.mean() - loads).sign().float(), rtol=0, atol=1e-7)
    assert balancer.load == pytest.approx((loads.max() / loads.mean()).item())


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_micro_batches_and_processes_give_the_same_bias_bit_for_bit(rule: str) -> None:
    biases = []
    for parts in (1, 2, 3):
        router, x = skewed()
        balancer = Balancer(router, rule, ONE)
        for part in x.chunk(parts):
            router(part)
        router.eval()(x)  # which validation does, and does not count
        balancer.update()
        biases.append(router.e_score_correction_bias)
    (one, x), (other, _) = skewed(), skewed()  # two processes, each with half of the tokens
    ours, theirs = Balancer(one, rule, ONE), Balancer(other, rule, ONE)
    one(x[:150])
    other(x[150:])
    messages = iter([*theirs.loads, *theirs.histograms])
    ours.who = SimpleNamespace(sum=lambda counts: counts.add_(next(messages)))
    ours.update()
    biases.append(one.e_score_correction_bias)
    assert all(torch.equal(bias, biases[0]) for bias in biases)


@pytest.mark.parametrize(("rule", "least", "most"), [("none", 2.0, 4.0), ("sign", 1.0, 1.6), ("quantile", 1.0, 1.2)])
def test_a_collapse_is_provoked_and_prevented(
    rule: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens have a common part, which lets a router prefer the same experts for all; those alone are trained."""
    monkeypatch.setattr(balance, "RATE", 0.02)
    torch.manual_seed(0)
    layer = KimiLinearMoE(config(n_shared_experts=1)).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        layer.gate.weight[:CHOSEN] += 0.3
    balancer = Balancer(layer, "sign" if rule == "none" else rule, ONE)
    optimizer = torch.optim.AdamW(layer.parameters(), 3e-3)
    target = torch.nn.Linear(WIDTH, WIDTH)
    loads = []
    for _ in range(60):
        x = 0.7 + 0.5 * torch.randn(1, 1024, WIDTH)
        loss = (layer(x) - target(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bias = layer.gate.e_score_correction_bias.clone()
        balancer.update()
        if rule == "none":
            layer.gate.e_score_correction_bias.copy_(bias)
        loads.append(balancer.load)
    assert least <= sum(loads[-10:]) / 10 <= most, loads[::10]


@pytest.mark.long  # test_loop.py stops and resumes one
def test_a_balanced_run_logs_its_loads(configure: Callable[..., TrainConfig], tmp_path: Path) -> None:
    extra: dict[str, Any] = {"model": {"size": SIZE}, "optim": {"balance": "quantile", "optimizer": "muon"}}
    train(configure(out="whole", **extra), progress=False)
    loads = [line["expert_load"] for line in lines(tmp_path / "whole") if line["kind"] == "train"]
    assert len(loads) == 4 and all(1 <= load <= EXPERTS / CHOSEN for load in loads)
    train(configure(out="again", gradient_checkpointing="layer", **extra), progress=False)
    again = [line["expert_load"] for line in lines(tmp_path / "again") if line["kind"] == "train"]
    assert again == loads, "a recomputed pass is not counted"


def test_what_cannot_be_balanced_is_refused(configure: Callable[..., TrainConfig]) -> None:
    with pytest.raises(UserError, match=r"optim\.balance is sign and .* no routers"):
        train(configure(optim={"balance": "sign"}), progress=False)
    with pytest.raises(UserError, match=r"optim\.balance is quantile and parallel\.pp above 1"):
        train(configure(optim={"balance": "quantile"}, parallel={"pp": 2}, depth_every=0), progress=False)
    grouped = DeepseekV3Config(hidden_size=WIDTH, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2)
    Balancer(DeepseekV3TopkRouter(grouped), "sign", ONE)
    with pytest.raises(UserError, match=r"optim\.balance is quantile and .*\(n_group above 1\)"):
        Balancer(DeepseekV3TopkRouter(grouped), "quantile", ONE)
