"""What an update is: PyTorch's optimizer after a plain backward pass, with rates worked out by hand."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attnres.training import TrainConfig, muon
from attnres.training.interrupt import Signals
from attnres.training.parallel import Processes
from attnres.training.prepare import prepare_run
from attnres.training.run import Run

RATES = (0.5, 1.0, 1.0, 0.55)
"""Two steps of warm-up, one at the peak and the first of the two that fall to a tenth."""
CLIP = 0.5
SCHEDULE = {"schedule": "wsd", "warmup": 0.4, "decay": 0.4, "min_lr_ratio": 0.1}
ADAMW = {"lr": 0.02, "residual_lr": 0.01, "betas": (0.6, 0.8), "clip": CLIP, "weight_decay": 0.3}
MUON = {"optimizer": "muon", "muon_lr": 0.03, "momentum": 0.5}


def trained(config: TrainConfig) -> tuple[Any, Any, list[Any]]:
    """A model in fp64 before a run and after four of its five steps, and their batches."""
    run = Run(prepare_run(config), Processes(0, 1, torch.device("cpu")), progress=False)
    before = deepcopy(run.model.double())
    for _ in RATES:
        run.step(Signals())
    run.close()
    return before, run.model, [run.batches.at(step) for step in range(len(RATES))]


def update(model: Any, batches: list[Any], optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """The same four steps, written out: each group of the optimizers has its `peak`."""
    clipped = []
    for (x, y), rate in zip(batches, RATES, strict=True):
        F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
        clipped.append(float(CLIP / norm))
        for gradient in gradients:
            gradient.mul_(min(clipped[-1], 1.0))
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad()
    assert max(clipped) < 0.9 and max(clipped) > 1.02 * min(clipped)  # each step is clipped, to another share


def parts(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Weight matrices, what reads, and everything else."""
    matrices, reads, others = [], [], []
    for name, parameter in model.named_parameters():
        place = matrices if name.endswith("proj.weight") else reads if "residual." in name else others
        place.append(parameter)
    assert len(matrices) == 14 and len(reads) == 2
    return matrices, reads, others


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_is_that_of_the_optimizer_with_the_rates_of_the_schedule(
    configure: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Clipped gradients, decayed matrices, the betas or the momentum that were asked for."""
    monkeypatch.setattr(muon, "precision", lambda _: torch.float64)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # which torch's Muon calls
    by_muon = optimizer == "muon"
    config = configure(steps=5, optim={**SCHEDULE, **ADAMW, **(MUON if by_muon else {})}, depth_every=0)
    expected, ours, batches = trained(config)
    start = deepcopy(expected)
    matrices, reads, others = parts(expected)
    groups = [
        {"params": reads, "weight_decay": 0.0, "peak": 0.01},
        {"params": others, "weight_decay": 0.0, "peak": 0.02},
    ]
    rest = {"params": matrices, "weight_decay": 0.3, "peak": 0.03 if by_muon else 0.02}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(groups if by_muon else [*groups, rest], betas=(0.6, 0.8), fused=False)
    }
    if by_muon:
        optimizers["muon"] = torch.optim.Muon([rest], momentum=0.5, adjust_lr_fn="match_rms_adamw")
    update(expected, batches, optimizers)
    theirs, before = dict(expected.named_parameters()), dict(start.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter - before[name]).abs().max() > 1e-3, name
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-6, msg=name)  # clipping adds 1e-6 to a norm
