"""Small matrices in one stack get from Muon what torch gives them one after the other."""

from typing import Any

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "nesterov": False},
        {"adjust_lr_fn": None, "momentum": 0.5, "ns_steps": 3},
    ],
)
def test_a_stack_is_updated_as_each_matrix_alone(options: dict[str, Any]) -> None:
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
