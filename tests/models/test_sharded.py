"""FSDP2: a model sharded over two processes computes what one process computes, with no warning of ours."""

import subprocess
import sys

import pytest
from launch import torchrun

SCRIPT = """
import gc, warnings
warnings.simplefilter("error")
# FSDP2 hands sources to a layer as views and finds some unchanged in its output; nothing changes them in place.
warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from attnres.models import build

SIZE = {"family": "qwen3", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
def make():
    model = build(SIZE, RESIDUAL, vocab_size=97, max_positions=32, seed=0)
    with torch.no_grad():
        model.residual.query.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model

dist.init_process_group("gloo")
rank = dist.get_rank()
ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(2))

alone = make()
loss = alone(input_ids=ids, labels=ids).loss
loss.backward()

model = make()
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
mine = ids[2 * rank : 2 * rank + 2]
for _ in range(2):  # a second backward accumulates
    part = model(input_ids=mine, labels=mine).loss
    part.backward()
dist.all_reduce(part.detach_())
torch.testing.assert_close(part / 2, loss.detach(), rtol=1e-5, atol=1e-6)
for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
    torch.testing.assert_close(ours.grad.full_tensor() / 2, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
del model, alone, loss, part, ours, theirs, layer
dist.destroy_process_group()
gc.collect()
"""


@pytest.mark.parametrize("residual", ["block", pytest.param("full", marks=pytest.mark.long)])
def test_a_sharded_model_computes_what_one_process_computes(residual):
    command = torchrun(2, "--no-python", sys.executable, "-c", f"RESIDUAL = {residual!r}\n{SCRIPT}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
