"""DiT's own model and diffusion loss with depth reads, on a CPU."""

import sys
from copy import deepcopy

import pytest
import torch

import attnres
from integrations import checks

G = torch.Generator().manual_seed(0)
X, T, Y = torch.randn(2, 4, 8, 8, generator=G), torch.tensor([10, 500]), torch.tensor([1, 3])
TARGET = torch.randn(2, 8, 8, 8, generator=G)


@pytest.fixture
def source(checkout, monkeypatch):
    checks.import_timm()
    monkeypatch.syspath_prepend(str(checkout("DiT")))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("models", "diffusion")]:
        del sys.modules[name]


@pytest.fixture
def subject(source):
    from models import DiT

    def build():
        torch.manual_seed(0)
        size = {"input_size": 8, "patch_size": 2, "hidden_size": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
        return checks.spread(DiT(**size, class_dropout_prob=0.0))

    def run(model):
        output = model(X, T, Y)
        return output, (output - TARGET).square().mean()

    return checks.Subject(build, checks.attached(X, T, Y), run)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)


def test_the_model(subject, note):
    note("how", "`attnres.attach`, 2 lines of train.py")
    checks.zero_queries(subject, note)
    checks.switches(subject)
    note("compile", checks.compiled(subject, subject.random_queries()))
    model = subject.random_queries()
    note("checkpointing", f"has none; {checks.checkpointed(subject, model, model.blocks)}")
    note("cache", "none")
    checks.tools(subject, note)


def test_its_diffusion_loss_and_mean_of_weights(subject, note):
    from diffusion import create_diffusion

    diffusion = create_diffusion(timestep_respacing="")
    model = subject.connected()
    ema, made = deepcopy(model), optimizer(model)
    for _ in range(10):
        torch.manual_seed(0)
        loss = diffusion.training_losses(model, X, T, {"y": Y})["loss"].mean()
        made.zero_grad()
        loss.backward()
        made.step()
    assert checks.reads(model).query.abs().max() > 0
    mean = dict(ema.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean[name].mul_(0.0).add_(parameter)  # as its update_ema does at decay 0
    assert checks.distance(ema(X, T, Y), model(X, T, Y)) == 0
    assert ema.forward_with_cfg(X, T, Y, 2.0).shape == (2, 8, 8, 8)
    checks.resumes(subject, optimizer)
    model = subject.connected()
    note("its optimizer", checks.groups(optimizer(model), model))
    note("resume", "bit-equal")
    assert attnres.detach(model) is not None
