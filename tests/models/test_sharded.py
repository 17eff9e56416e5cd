"""FSDP2: a model sharded over two processes computes what one process computes, with no warning of ours. FSDP 1: reads
are a unit of their own, or a sentence says that they have to be."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from launch import PATIENCE_S, torchrun
from tiny import narrow_llama
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from attnres import UserError, convert
from attnres.residuals import Residual

SCRIPT = """
import gc, warnings
warnings.simplefilter("error")
# FSDP2 hands sources to a layer as views and finds some unchanged in its output; nothing changes them in place.
warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from attnres import regroup
from attnres.models import build

SIZE = {"family": "qwen3", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
def make(residual):
    model = build(SIZE, residual, vocab_size=97, max_positions=32, seed=0)
    with torch.no_grad():
        model.residual.query.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model

def compare(residual):
    rank = dist.get_rank()
    ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(2))

    alone = make(residual)
    loss = alone(input_ids=ids, labels=ids).loss
    loss.backward()

    model = make(residual)
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

    # Somebody's optimizer of DTensors, regrouped: queries are slow and not decayed, and a step is that of one process.
    for ours in model.parameters():
        ours.grad /= 2
    for one in (model, alone):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            regroup(optimizer, one)
        slow = [(round(g["lr"], 9), g["weight_decay"], len(g["params"])) for g in optimizer.param_groups[1:]]
        assert slow == [(0.01, 0.0, 2)], slow
        optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-6, msg=name)

dist.init_process_group("gloo")
for residual in ("block", "full"):
    compare(residual)
dist.destroy_process_group()
gc.collect()
"""


@pytest.mark.long
def test_a_sharded_model_computes_what_one_process_computes():
    command = torchrun(2, "--no-python", sys.executable, "-c", SCRIPT)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_bf16(residual):
    new = convert(narrow_llama(20, 0).bfloat16(), residual)
    with torch.no_grad():
        new.residual.query.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return new


def of_accelerate(model):
    """The policy that accelerate, and so Transformers' `Trainer`, makes for a model."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    return plugin.auto_wrap_policy


def of_classes(model):
    return ModuleWrapPolicy({LlamaDecoderLayer, Residual})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch.distributed")  # FSDP 1 is retired
@pytest.mark.parametrize("mixed", [None, MixedPrecision(torch.bfloat16)], ids=["", "mixed precision"])
@pytest.mark.parametrize(("residual", "policy"), [("block", of_accelerate), ("full", of_classes)])
def test_fsdp1_trains_reads_in_fp32_beside_weights_in_bf16(alone, residual, policy, mixed):
    ids = torch.arange(24).view(2, 12) % 20
    plain, model = in_bf16(residual), in_bf16(residual)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, "mixed_precision": mixed}
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy(model), **options)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    (query,) = (parameter for name, parameter in model.named_parameters() if name.endswith("query"))
    assert query.dtype is torch.float32
    difference = query.grad.flatten() - plain.residual.query.grad.flatten()
    assert difference.norm() < 0.02 * plain.residual.query.grad.norm(), "rounding in bf16"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch.distributed")
def test_fsdp1_says_which_class_its_policy_lacks(alone):
    with pytest.raises(UserError, match=r"attnres\.residuals\.Residual.*auto_wrap_policy"):
        FullyShardedDataParallel(
            in_bf16("block"), auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu")
        )
