"""Kernels get memory that is there: results of collectives are waited for, shares of distributed tensors refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from attnres import Norm, UserError, depth_read
from attnres.ops import merge, read_sealed


class Late(torch.autograd.Function):
    """Identity whose result, and whose gradient, are results of collectives that nobody has waited for."""

    @staticmethod
    def forward(ctx, tensor):
        return AsyncCollectiveTensor(tensor.clone())

    @staticmethod
    def backward(ctx, grad):
        return AsyncCollectiveTensor(grad.clone())


def read(wrap, dtype=torch.float32):
    """A read in one pass and two in two phases over sources and an output that `wrap` wraps; results and gradients."""
    g = torch.Generator().manual_seed(0)
    sources = [torch.randn(6, 16, dtype=dtype, generator=g).requires_grad_() for _ in range(4)]
    queries = torch.randn(2, 16, generator=g).requires_grad_()
    weight = torch.ones(16, requires_grad=True)
    wrapped = [wrap(source) for source in sources]
    one = wrap(depth_read(wrapped, queries[0], norm=Norm(weight)))
    sealed = read_sealed(wrapped[:3], queries)
    first = merge(sealed.read(0), wrapped[3:], wrap(sources[0]), queries[0], Norm(weight))
    second = merge(sealed.read(1), first.opens, None, queries[1], None, recompute=True)
    out = (one, wrap(first.x), wrap(second.x))
    loss = sum((tensor.float() ** 2).sum() for tensor in out)
    return [*out, *torch.autograd.grad(loss, [*sources, queries, weight])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_of_collectives_are_waited_for_forward_and_backward(backend, dtype):
    for late, plain in zip(read(Late.apply, dtype), read(lambda tensor: tensor, dtype), strict=True):
        torch.testing.assert_close(late + 0, plain)  # gradients of a source are added in another order


def test_shares_of_distributed_tensors_are_refused_by_name(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        source, query = torch.randn(3, 8), torch.randn(8)
        for sources, vector in (
            ([source, distribute_tensor(source, mesh, [Replicate()])], query),
            ([source, source + 1], distribute_tensor(query, mesh, [Replicate()])),
        ):
            with pytest.raises(UserError, match=r"a DTensor of shape .* leave the residual out of what is sharded"):
                depth_read(sources, vector)
    finally:
        dist.destroy_process_group()
