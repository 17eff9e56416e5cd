"""Whole models on a device: compiled, captured, checkpointed, sharded, decoded; Block and Full beside the standard."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import PATIENCE_S
from torch import Tensor
from transformers import StaticCache

from attnres.inspect import record
from attnres.models import build

VOCAB = 64
SETTINGS: dict[str, dict[str, Any]] = {"standard": {}, "block": {"block_size": 2}, "full": {}}
ours = pytest.mark.parametrize("residual", ["block", "full"])


def make(device: str, residual: str, layers: int = 3, seed: int = 0) -> Any:
    """A small decoder with the pseudo-queries of a trained one."""
    width = 256 if device == "cuda" else 32
    size = {
        "family": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "intermediate_size": 3 * width // 2,
    }
    model: Any = build(size, residual, vocab_size=VOCAB, max_positions=128, seed=seed, settings=SETTINGS[residual])
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=g) / (width / 32) ** 0.5)
    return model.to(device)


def make_ids(device: str, batch: int = 2, length: int = 33, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits.float().square().mean()


def gradients(model: Any, ids: Tensor, forward: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    loss = loss_of(model if forward is None else forward, ids)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Each gradient within `relative` of the expected one, by norm."""
    bad = {}
    for name, value in expected.items():
        error = ((actual[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-6)).item()
        if not error <= relative:
            bad[name] = error
    assert not bad, bad


@ours
@pytest.mark.gpu  # on a CPU it is one of tests/models/test_models.py
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about the machine
def test_a_whole_model_compiles_without_a_graph_break(cuda: str, residual: str) -> None:
    torch._dynamo.reset()
    model, ids = make(cuda, residual, layers=2).train(), make_ids(cuda)
    expected = gradients(model, ids)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        assert_close(gradients(model, ids, compiled), expected, 1e-3)


@ours
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_runs_in_cuda_graphs(cuda: str, residual: str) -> None:
    torch._dynamo.reset()
    model = make(cuda, residual, layers=2).train()
    batches = [make_ids(cuda, seed=seed) for seed in range(3)]
    expected = [gradients(model, ids) for ids in batches]
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(2):  # the first rounds warm up and record, the later ones replay
        for ids, value in zip(batches, expected):
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(gradients(model, ids, compiled), value, 1e-3)


@ours
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_training_step_is_captured_and_replayed(cuda: str, residual: str, dtype: torch.dtype) -> None:
    model = make(cuda, residual).train()
    batches = [make_ids(cuda, seed=seed) for seed in range(3)]

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(cuda, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            loss = loss_of(model, ids)
        loss.backward()
        return loss

    expected = []
    for ids in batches:
        model.zero_grad()
        loss = step(ids).detach()
        expected.append({"loss": loss, **{name: p.grad.clone() for name, p in model.named_parameters()}})

    static = batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(static)
    for ids, value in zip(batches, expected):
        static.copy_(ids)
        graph.replay()
        actual = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
        assert_close(actual, value, 1e-4 if dtype == torch.float32 else 2e-2)


@ours
def test_decoding_from_a_static_cache_is_uncached_decoding(device: str, residual: str) -> None:
    model, ids = make(device, residual).eval(), make_ids(device, length=12)
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        actual = [model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True).logits]
        for i in range(7, 12):
            actual.append(model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(actual, 1), full, rtol=1e-3, atol=1e-4)


@ours
@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5])
def test_a_decode_step_is_captured_and_replayed(cuda: str, residual: str, batch: int) -> None:
    model, ids = make(cuda, residual).eval(), make_ids(cuda, batch=batch, length=12)
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True)
        state = [(x, x.clone()) for y in cache.layers for x in (y.keys, y.values, y.cumulative_length)]

        def rewind() -> None:
            for tensor, value in state:
                tensor.copy_(value)

        token = ids[:, 7:8].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(input_ids=token, past_key_values=cache, use_cache=True)
        torch.cuda.current_stream().wait_stream(side)
        rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        rewind()
        for i in range(7, 12):
            token.copy_(ids[:, i : i + 1])
            graph.replay()
            torch.testing.assert_close(logits, full[:, i : i + 1], rtol=1e-3, atol=1e-4)


@ours
@pytest.mark.parametrize("how", ["layers", "reads", "both"])
def test_what_is_made_again_in_backward_gives_the_same_gradients(device: str, residual: str, how: str) -> None:
    model, ids = make(device, residual).train(), make_ids(device)
    expected = gradients(model, ids)
    if how != "reads":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.residual.recompute_reads = how != "layers"
    assert_close(gradients(model, ids), expected, 1e-5)


def kept(model: Any, ids: Tensor) -> dict[int, tuple[int, int]]:
    """What a forward pass keeps for backward besides parameters: elements and bytes of each storage."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, int]] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)
            seen[storage.data_ptr()] = (storage.nbytes() // tensor.element_size(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, ids)
    return seen


@ours
def test_a_model_keeps_nothing_stack_shaped_for_backward(device: str, residual: str) -> None:
    """Beside what the standard residual keeps: a vector a sublayer, and scalars a token and source."""
    layers, ids = 6, make_ids(device)
    standard = kept(make(device, "standard", layers).train(), ids)
    model = make(device, residual, layers).train()
    actual = kept(model, ids)
    vector = ids.numel() * model.config.hidden_size
    usual = {elements for elements, _ in standard.values()}
    one_merge = ids.numel() * (3 * (2 * layers + 1) + 2)  # its scalars are one buffer
    assert {elements for elements, _ in actual.values() if elements > max(vector, one_merge)} <= usual
    more = sum(size for _, size in actual.values()) - sum(size for _, size in standard.values())
    scalars = 4 * ids.numel() * 2 * layers * (2 * layers + 8)
    assert more <= 4 * vector * 2 * layers * 1.1 + scalars
    model.residual.recompute_reads = True
    assert sum(size for _, size in kept(model, ids).values()) < sum(size for _, size in actual.values())


@ours
def test_accumulated_gradients_are_those_of_the_whole_batch(device: str, residual: str) -> None:
    model, ids = make(device, residual).train(), make_ids(device, batch=4)
    expected = gradients(model, ids)
    model.zero_grad()
    for part in ids.chunk(2):
        (loss_of(model, part) / 2).backward()
    actual = {"loss": expected["loss"], **{name: p.grad for name, p in model.named_parameters()}}
    assert_close(actual, expected, 1e-4)


@ours
def test_a_retained_graph_gives_the_same_gradients_twice(device: str, residual: str) -> None:
    model, ids = make(device, residual).train(), make_ids(device)
    loss = loss_of(model, ids)
    parameters = list(model.parameters())
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@ours
def test_frozen_layers_and_a_frozen_embedding_leave_the_other_gradients(device: str, residual: str) -> None:
    model, ids = make(device, residual).train(), make_ids(device)
    expected = gradients(model, ids)
    frozen = [model.model.embed_tokens, model.model.layers[1], model.lm_head]
    for module in frozen:
        module.requires_grad_(False)
    model.zero_grad()
    loss_of(model, ids).backward()
    actual = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert_close(actual, {name: expected[name] for name in actual}, 1e-5)
    assert 0 < len(actual) < len(expected) - 1


@pytest.mark.parametrize("residual", ["standard", "block", "full"])
def test_bf16_autocast_trains_every_parameter_close_to_fp32(device: str, residual: str) -> None:
    model, ids = make(device, residual).train(), make_ids(device)
    expected = gradients(model, ids)
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        loss = loss_of(model, ids)
    loss.backward()
    actual = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    assert all(value is not None and value.isfinite().all() for value in actual.values())
    assert_close(actual, expected, 0.15)


@ours
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_model_of_a_narrow_dtype_runs_and_stays_close(device: str, residual: str, dtype: torch.dtype) -> None:
    model, ids = make(device, residual).eval(), make_ids(device)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        narrow = model.to(dtype)
        for parameter in narrow.residual.parameters():
            parameter.data = parameter.data.float()
        actual = narrow(input_ids=ids, use_cache=False).logits
    assert actual.dtype == dtype
    assert (actual.float() - expected).norm() < (0.05 if dtype == torch.bfloat16 else 0.01) * expected.norm()


@pytest.mark.parametrize("share", [{"gate": "scalar"}, {"alpha": "learnable"}], ids=["gate", "alpha"])
def test_what_held_back_reads_are_made_of_is_recorded(
    device: str, share: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording keeps weights on the CPU, what holds reads back lies with the model."""
    monkeypatch.setitem(SETTINGS, "full", share)
    model = make(device, "full").eval()
    with torch.no_grad(), record(model, tokens=True) as trace:
        model(input_ids=make_ids(device), use_cache=False)
    assert trace.mixing is not None and trace.token_mixing is not None
    rows = torch.stack([row.double().mean((0, 1)) for row in trace.token_mixing])
    torch.testing.assert_close(rows, torch.from_numpy(trace.mixing).double(), atol=1e-5, rtol=1e-4)


SHARDED = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
import test_models

device, residual, store = sys.argv[2:]
dist.init_process_group(
    "nccl" if device == "cuda" else "gloo", store=dist.FileStore(store, 1), rank=0, world_size=1,
    device_id=torch.device("cuda", 0) if device == "cuda" else None,
)
ids = test_models.make_ids(device)
expected = test_models.gradients(test_models.make(device, residual).train(), ids)

wrapped = DistributedDataParallel(test_models.make(device, residual).train())
actual = test_models.gradients(wrapped, ids)
test_models.assert_close({name.removeprefix("module."): g for name, g in actual.items()}, expected, 1e-5)
del wrapped

model = test_models.make(device, residual).train()
mesh = init_device_mesh(device, (1,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for _ in range(2):
    actual = test_models.gradients(model, ids)
whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in actual.items()}
test_models.assert_close(whole, expected, 1e-5)
del model, actual, whole
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.long
@ours
def test_ddp_and_fsdp2_train_the_same_model(device: str, residual: str, tmp_path: Any) -> None:
    """On one process: that wrapping, sharding and gathering see every parameter and change no gradient."""
    here = str(__file__).rpartition("/")[0]
    command = [sys.executable, "-c", SHARDED, here, device, residual, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr
