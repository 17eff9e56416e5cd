"""Which path a call takes: the schedule that moves less, the kernels that can, and a word where they cannot."""

import logging

import pytest
import torch

from attnres import depth_read
from attnres.ops import cpu, dispatch, eager, explain, gpu, in_two_phases
from attnres.ops.backend import Kernels


def test_two_phases_pay_from_three_sources_when_four_reads_share_them():
    assert [in_two_phases(n, 4, training=False) for n in (1, 2, 3, 9)] == [False, False, True, True]
    assert [in_two_phases(n, 4, training=True) for n in (1, 2, 9)] == [False, True, True]
    assert not in_two_phases(20, 1, training=True)  # one read has nothing to share


def test_more_sources_than_one_pass_takes_are_read_in_two_phases():
    assert in_two_phases(dispatch.MAX_ONE_PASS + 1, 1, training=True)
    assert in_two_phases(dispatch.MAX_ONE_PASS - 2, 1, training=True, opens=3)
    sources = [torch.randn(3, 16) for _ in range(40)]
    query = torch.randn(16)
    h, weights = depth_read(sources, query, return_weights=True)
    torch.testing.assert_close(h, torch.einsum("nt,ntd->td", weights, torch.stack(sources)))


def test_explain_names_the_path_and_the_reason(backend):
    plan = explain([torch.zeros(2, 8, 32)] * 9, reads=4, opens=1, training=True)
    assert plan.schedule == "two phases" and plan.backend == backend
    assert "9 sources and 4 reads move 144 vectors a token in one pass, 61 in two phases (training)" in str(plan)
    assert explain([torch.zeros(4, 32)] * 40).reasons[1].startswith("one pass takes at most 32 sources, here are 40")
    plan = explain([torch.zeros(4, 32, dtype=torch.float64)] * 2)
    assert plan.backend == "eager" and "float64" in plan.reasons[0]


def test_a_fallback_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "load", lambda: None)
    monkeypatch.delenv("ATTNRES_CPU_KERNELS", raising=False)
    dispatch._say_once.cache_clear()
    sources, query = [torch.randn(4, 32) for _ in range(3)], torch.randn(32)
    with caplog.at_level(logging.WARNING, logger="attnres"):
        depth_read(sources, query)
        depth_read(sources, query)
    assert len([r for r in caplog.records if "plain torch" in r.getMessage()]) == 1


@pytest.mark.parametrize("n", [2, 5, 40])
def test_a_read_made_again_in_backward_is_the_same_read(backend, n):
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(7, 32, generator=g).requires_grad_() for _ in range(n)]
    query = torch.randn(32, generator=g).requires_grad_()
    upstream = torch.randn(7, 32, generator=g)
    results = []
    for level in (0, 1):
        h = depth_read(leaves, query, checkpoint_level=level)
        results.append([h, *torch.autograd.grad(h, [*leaves, query], upstream)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_read_made_again_keeps_no_vector_of_its_own(backend):
    leaves = [torch.randn(64, 32, requires_grad=True) for _ in range(4)]
    query = torch.randn(32, requires_grad=True)
    own = {tensor.data_ptr() for tensor in [*leaves, query]}

    def kept(level):
        sizes = []

        def pack(tensor):
            if tensor.data_ptr() not in own:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            depth_read(leaves, query, checkpoint_level=level)
        return max(sizes, default=0)

    assert kept(0) == 64 * 32 and kept(1) < 64 * 32


def test_a_gpu_of_another_kind_takes_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in gpu.load.__wrapped__()


def test_kernels_for_another_device_are_a_backend_and_a_row(monkeypatch):
    """Here for one whose calls are those of plain torch, counted."""
    calls = []

    class Counting:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(eager, name)

    def why_not(call):
        return f"{call.opens} open sources are more than 3" if call.opens > 3 else None

    row = Kernels("cpu", "other", "the kernels of another device", "such a device", Counting, why_not)
    counting = Counting()
    monkeypatch.setitem(dispatch.KERNELS, "cpu", row._replace(load=lambda: counting))
    sources = [torch.randn(3, 16, requires_grad=True) for _ in range(4)]
    depth_read(sources[:3], torch.randn(16)).sum().backward()
    assert calls == ["merge", "merge_backward"]
    plan = explain(sources[:3])
    assert plan.backend == "other" and "on the kernels of another device: such a device" in str(plan)
    assert explain(sources, opens=4).reasons[0] == "4 open sources are more than 3"
    calls.clear()
    depth_read(sources, torch.randn(16)).sum().backward()
    assert not calls
