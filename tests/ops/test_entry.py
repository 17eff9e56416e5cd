"""What goes to C is checked: tensors without numbers, or of other shapes, are refused or go to plain torch."""

import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from attnres import Norm, UserError, depth_read, depth_read_reference
from attnres.ops import cpu, merge, read_sealed

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="no C compiler: the CPU kernels cannot be built")


class Named(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = tmp_path_factory.mktemp("store") / "file"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


def fake(x):
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


REFUSED = {
    "meta": lambda x: x.to("meta"),
    "fake": fake,
    "sharded": lambda x: DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()]),
    "short": lambda x: x[..., : x.shape[-1] // 2],
    "batched": lambda x: x.expand(3, *x.shape),
    "sparse": lambda x: x.to_sparse(),
}
TAKEN = {
    "as it is": lambda x: x,
    "named": lambda x: x.as_subclass(Named),
    "in flight": AsyncCollectiveTensor,
    "parameter": lambda x: torch.nn.Parameter(x.detach().clone()),
    "bf16": lambda x: x.bfloat16().float().to(torch.bfloat16),
    "fp16": lambda x: x.half(),
    "fp64": lambda x: x.double(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "reversed": lambda x: x.flip(-1).flip(-1),
    "frozen": lambda x: x.detach(),
}


@settings(max_examples=40)
@given(
    where=st.sampled_from(["source", "query", "gain", "weight"]),
    how=st.sampled_from(sorted({**REFUSED, **TAKEN})),
    tokens=st.sampled_from([0, 1, 5]),
    count=st.integers(2, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_kind_of_tensor_is_read_rightly_or_refused(where, how, tokens, count, dtype):
    draw = torch.Generator().manual_seed(tokens + count)

    def tensor(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=draw).to(torch.bfloat16).to(dtype).requires_grad_()

    sources = [tensor(tokens, 32, dtype=dtype) for _ in range(count)]
    vectors = {"query": tensor(32), "gain": tensor(32), "weight": tensor(32)}
    expected, _ = depth_read_reference([s.detach().double() for s in sources], vectors["query"], vectors["gain"])
    expected = torch.nn.functional.rms_norm(expected, (32,), vectors["weight"].double(), 1e-6)
    change = {**REFUSED, **TAKEN}[how]
    if where == "source":
        sources[-1] = change(sources[-1].detach())
    else:
        vectors[where] = change(vectors[where].detach())
    try:
        x = depth_read(sources, vectors["query"], vectors["gain"], norm=Norm(vectors["weight"]))
        if x.requires_grad:
            x.sum().backward()
    except (ValueError, RuntimeError, TypeError, NotImplementedError, AssertionError) as error:  # ours or torch's own
        assert (how in REFUSED or (how, where) == ("in flight", "weight")) and str(error), (how, where, error)
        return
    if how in TAKEN:
        torch.testing.assert_close(torch.Tensor(x).double(), expected, rtol=3e-2, atol=3e-2)
    else:  # without tokens nothing is read; plain torch makes a DTensor or a meta tensor of such
        assert not tokens or type(x) is not torch.Tensor or x.is_meta


@pytest.mark.parametrize("how", ["meta", "freed", "short"])
@pytest.mark.parametrize("where", ["query", "weight"])
def test_the_sentence_says_what_to_do(where, how):
    vectors = {"query": torch.ones(32), "weight": torch.ones(32)}
    vectors[where] = {**REFUSED, "freed": freed}[how](vectors[where])
    says = r"shape \(16,\): expected \(32,\)" if how == "short" else "offloaded, sharded or on the meta device"
    with pytest.raises(UserError, match=says):
        merge(None, [torch.ones(4, 32)] * 2, None, vectors["query"], Norm(vectors["weight"]))


def test_a_graph_goes_back_through_the_kernels_that_made_it():
    """Whatever reads take by then: another thread may have turned the kernels off for a while."""
    leaf = torch.randn(3, 4, 32, requires_grad=True)
    query = torch.randn(32)
    (expected,) = torch.autograd.grad(depth_read(list(leaf), query).square().sum(), leaf)
    loss = depth_read(list(leaf), query).square().sum()
    with cpu.switched(False):
        (ours,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(ours, expected)


def test_what_a_layer_writes_has_the_shape_of_the_stream():
    sealed = read_sealed([torch.ones(4, 32)] * 2, torch.ones(1, 32))
    with pytest.raises(UserError, match=r"shape \(1, 32\): expected \(4, 32\)"):
        merge(sealed.read(0), [torch.ones(4, 32)], torch.ones(1, 32), torch.ones(32))
