"""A Vision Transformer of timm with depth reads, on a CPU."""

from functools import partial

import pytest
import torch
from torch.nn import functional

import attnres
from integrations import checks

timm = checks.import_timm()
X, Y = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3])


def build(**options):
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return checks.spread(timm.create_model("vit_tiny_patch16_224", **size, **options))


def run(model):
    logits = model(X)
    return logits, functional.cross_entropy(logits, Y)


VIT = checks.Subject(build, checks.attached(X), run)


def optimizer(model, opt="adamw"):
    from timm.optim import create_optimizer_v2

    made = create_optimizer_v2(model, opt=opt, lr=1e-2, weight_decay=0.05)
    attnres.regroup(made, model)
    return made


@pytest.mark.parametrize("options", [{}, {"init_values": 0.1, "class_token": False, "global_pool": "avg"}], ids=str)
def test_zero_queries_are_the_model_of_timm(options, note):
    note("how", "`attnres.attach`, 1 line")
    checks.zero_queries(VIT._replace(build=partial(build, **options)), note)
    checks.switches(VIT)


def test_its_optimizers(note):
    from timm.optim import create_optimizer_v2

    model = VIT.connected()
    told = checks.groups(create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05), model)
    model = VIT.connected()
    muon = create_optimizer_v2(model, opt="muon", lr=1e-3, weight_decay=0.05)
    run(model)[1].backward()
    muon.step()
    was = muon.state[model.residual.query]["use_muon"]
    muon = create_optimizer_v2(model := VIT.connected(), opt="muon", lr=1e-3, weight_decay=0.05)
    checks.groups(muon, model)
    checks.ten_steps(VIT, model, muon)
    assert not muon.state[model.residual.query]["use_muon"]
    checks.ten_steps(VIT, model := VIT.connected(), optimizer(model))
    checks.resumes(VIT, optimizer)
    note("its optimizer", f"{told}{', muon took them' if was else ''}; regroup")
    note("resume", "bit-equal")


@pytest.mark.long
def test_compile_checkpointing_and_copies(note):
    note("compile", checks.compiled(VIT, VIT.random_queries()))
    model = VIT.random_queries()
    eager = checks.one_pass(VIT, model)
    model.set_grad_checkpointing()
    pair = checks.compare(checks.one_pass(VIT, model), eager)
    assert max(pair) < 1e-5
    note("checkpointing", checks.tell(pair))
    checks.deep_copied(VIT)
    from timm.utils import ModelEmaV3

    model = VIT.random_queries()
    average = ModelEmaV3(model)
    average.update(model)
    assert checks.distance(average.module(X), model(X)) == 0


def test_features_and_heads():
    plain, model = build(), VIT.connected()
    theirs, ours = (m.forward_intermediates(X, indices=[0, 1], intermediates_only=True) for m in (plain, model))
    assert max(map(checks.distance, ours, theirs)) < 3e-6
    model.reset_classifier(7)
    assert model(X).shape == (2, 7)


def test_record_and_intervene(note):
    checks.tools(VIT, note)
