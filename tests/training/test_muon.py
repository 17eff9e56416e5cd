"""Small matrices in one stack get from Muon what torch gives them one after the other."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnres.training import muon
from attnres.training.muon import StackedMuon

SHAPES = [(16, 16)] * 3 + [(48, 16)] * 2 + [(16, 48)] * 2 + [(8, 24), (300, 300)]


def stepped(
    optimizer_class: type[torch.optim.Optimizer], steps: int = 4, **options: Any
) -> tuple[list[nn.Parameter], Any]:
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(shape, generator=draw)) for shape in SHAPES]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.003, "weight_decay": 0.0}]
    optimizer = optimizer_class(groups, **{"lr": 0.01, "weight_decay": 0.1, **options})
    for step in range(steps):
        for place, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=draw)
            parameter.grad = None if (step, place) == (2, 1) else gradient
        optimizer.step()
    return parameters, optimizer


@pytest.mark.quick("options2")
@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "nesterov": False},
        {"adjust_lr_fn": None, "momentum": 0.5, "ns_steps": 3},
    ],
)
def test_a_stack_is_updated_as_each_matrix_alone(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "precision", lambda _: torch.bfloat16)
    assert {torch.Size(shape).numel() <= StackedMuon.small for shape in SHAPES} == {True, False}
    (ours, stacked), (theirs, alone) = stepped(StackedMuon, **options), stepped(torch.optim.Muon, **options)
    for one, other, start in zip(ours, theirs, stepped(StackedMuon, steps=0)[0], strict=True):
        assert (one - start).abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # bf16 steps of products in another order at most
        assert one.grad is not None and torch.equal(one.grad, other.grad)
    kept, expected = stacked.state_dict(), alone.state_dict()
    assert kept["param_groups"] == expected["param_groups"] and kept["state"].keys() == expected["state"].keys()
    for place, state in expected["state"].items():
        assert torch.equal(kept["state"][place]["momentum_buffer"], state["momentum_buffer"])


def test_where_bf16_is_emulated_every_matrix_is_orthogonalised_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"adjust_lr_fn": "match_rms_adamw"}
    theirs, _ = stepped(torch.optim.Muon, **options)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda _: pytest.fail("a product in bf16"))
    monkeypatch.setattr(muon, "precision", lambda _: torch.float32)
    ours, _ = stepped(StackedMuon, **options)
    for one, other, start in zip(ours, theirs, stepped(StackedMuon, steps=0)[0], strict=True):
        change, expected = one - start, other - start
        assert (change - expected).norm() < 0.02 * expected.norm()  # what bf16's eight bits leave
        assert not torch.equal(change, expected)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (300, 300)])
def test_in_fp32_the_steps_are_those_of_the_formula(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "precision", lambda _: torch.float32)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    group = torch.optim.Muon([nn.Parameter(update)], lr=0.5, adjust_lr_fn="match_rms_adamw").param_groups[0]
    left, values, right = np.linalg.svd(update.double().numpy(), full_matrices=False)
    values /= np.linalg.norm(values)
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):  # the polynomial of a matrix is that of its singular values
        values = a * values + b * values**3 + c * values**5
    expected = torch.from_numpy(left * values @ right).float()
    torch.testing.assert_close(muon.orthogonal([update], group)[0], expected, rtol=0, atol=1e-5)
    rate = 0.5 * 0.2 * max(shape) ** 0.5
    torch.testing.assert_close(muon._orthogonal(update, group), -rate * expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("precise", [torch.bfloat16, torch.float32])
def test_a_step_takes_as_many_calls_for_forty_matrices_as_for_four(
    precise: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one shape, large ones too where it is not the host that computes; and in several stacks where one would be too
    large."""
    monkeypatch.setattr(muon, "precision", lambda _: precise)
    monkeypatch.setattr(muon, "is_host", lambda _: False)
    monkeypatch.setattr(StackedMuon, "small", 0)

    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
            self.count += not views
            return func(*args, **(kwargs or {}))

    def calls(matrices: int, most: int) -> int:
        monkeypatch.setattr(StackedMuon, "most", most)
        parameters = [nn.Parameter(torch.randn(8, 12)) for _ in range(matrices)]
        for parameter in parameters:
            parameter.grad = torch.randn(8, 12)
        optimizer = StackedMuon(parameters, lr=0.1)
        optimizer.step()  # which makes the state
        with Calls() as counted:
            optimizer.step()
        return counted.count

    assert 10 < calls(4, 1 << 20) == calls(40, 1 << 20) < 40
    assert 3 * calls(40, 1 << 20) < calls(40, 8 * 12 * 10) <= 4 * calls(40, 1 << 20)


@pytest.mark.parametrize("most", [1 << 26, 700], ids=["one stack", "several stacks"])
def test_stacked_experts_are_as_many_matrices_of_their_own(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "precision", lambda _: torch.float64)
    monkeypatch.setattr(StackedMuon, "most", most)
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(5, *shape, generator=draw, dtype=torch.float64) for shape in ((16, 24), (24, 16))]
    gradients = [[torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in start] for _ in range(3)]
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    experts = [nn.Parameter(x.clone()) for x in start]
    apart = [[nn.Parameter(matrix.clone()) for matrix in x] for x in start]
    together, alone = StackedMuon(experts, **options), [StackedMuon([p], **options) for many in apart for p in many]
    for step in gradients:
        for parameter, many, gradient in zip(experts, apart, step, strict=True):
            parameter.grad = gradient
            for one, part in zip(many, gradient, strict=True):
                one.grad = part
        for optimizer in (together, *alone):
            optimizer.step()
    for parameter, many, before in zip(experts, apart, start, strict=True):
        assert (parameter - before).abs().max() > 1e-3
        torch.testing.assert_close(parameter.detach(), torch.stack([p.detach() for p in many]), rtol=0, atol=1e-12)
