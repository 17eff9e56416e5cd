"""The DiT of diffusers with depth reads, on a CPU."""

import pytest
import torch
from safetensors.torch import load_file

import attnres
from integrations import checks

diffusers = pytest.importorskip("diffusers", reason="make integrations installs it")
G = torch.Generator().manual_seed(0)
EXAMPLE = {
    "hidden_states": torch.randn(2, 4, 8, 8, generator=G),
    "timestep": torch.tensor([10, 500]),
    "class_labels": torch.tensor([1, 3]),
}
TARGET = torch.randn(2, 8, 8, 8, generator=G)


def build():
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4, "sample_size": 8, "patch_size": 2}
    return checks.spread(diffusers.DiTTransformer2DModel(**size, out_channels=8, num_embeds_ada_norm=5))


def connect(model, residual, **settings):
    attnres.attach(model, residual, example=EXAMPLE, layers="transformer_blocks", norms=None, **settings)
    return model


def run(model):
    torch.manual_seed(0)  # labels are dropped at random in training
    output = model(**EXAMPLE).sample
    return output, (output - TARGET).square().mean()


DIT = checks.Subject(build, connect, run)


def optimizer(model):
    made = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    attnres.regroup(made, model)
    return made


def test_zero_queries_are_the_model_of_diffusers(note):
    note("how", "`attnres.attach`, one read a layer, 1 line")
    checks.zero_queries(DIT, note)
    checks.switches(DIT)


def test_training_and_saving(note, tmp_path):
    model = DIT.connected()
    told = checks.groups(torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01), model)
    note("its optimizer", f"{told} in AdamW; regroup")
    checks.ten_steps(DIT, model, optimizer(model))
    checks.resumes(DIT, optimizer)
    model.save_pretrained(tmp_path)
    again = DIT.connected()
    again.load_state_dict(load_file(tmp_path / "diffusion_pytorch_model.safetensors"))
    assert checks.distance(run(again)[0], run(model)[0]) == 0
    note("resume", "bit-equal")


@pytest.mark.long
def test_compile_checkpointing_and_tools(note):
    note("compile", checks.compiled(DIT, DIT.random_queries().eval()))
    model = DIT.random_queries()
    eager = checks.one_pass(DIT, model)
    model.enable_gradient_checkpointing()
    pair = checks.compare(checks.one_pass(DIT, model), eager)
    assert max(pair) < 1e-5
    note("checkpointing", checks.tell(pair))
    note("cache", "none")
    checks.tools(DIT, note)
