"""Expert parallelism: every process has some experts of a mixture, and tokens are sent to their experts and back.

A process sorts its tokens by the experts that its router chose, sends every other process the number of tokens to
expect, then the tokens (all-to-all), runs its experts on the tokens that it received, and weighs and sums the results
for its own tokens. No token is dropped, however uneven the loads. An expert computes the forward of its module, so any
family's activation, biases and grouped products are used unchanged.

Messages a layer: three in a forward pass (counts, tokens, results), two in its backward (gradients of the latter two).
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from attnres.errors import UserError


def stacked_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model, by name, that hold the weights of all experts of a layer in stacks.

    Each parameter is a stack with one entry an expert, and a call is one of Transformers' experts: (tokens (T, d),
    experts (T, k), their weights (T, k)) -> (T, d).
    """
    return {name: module for name, module in model.named_modules() if _count(module)}


def _count(module: Any) -> int:
    """Return the number of experts in a module; 0 where it is no stack of experts."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or len(inspect.signature(module.forward).parameters) != 3:
        return 0
    weights = list(module.parameters())
    stacked = all(weight.ndim and len(weight) == count for weight in weights)
    return count if stacked and any(weight.ndim == 3 for weight in weights) else 0


def check_experts(model: nn.Module, ep: int) -> None:
    """Raise UserError for a model whose experts cannot be distributed over so many processes."""
    experts = stacked_experts(model)
    if not experts:
        raise UserError(
            f"ep is {ep} and {type(model).__name__} has no layers of stacked experts, as mixtral, qwen3_moe "
            "and kimi_linear have: leave ep out"
        )
    for name, module in experts.items():
        count = _count(module)
        if count % ep:
            raise UserError(
                f"ep is {ep} and {name} has {count} experts, which do not divide by it: give an ep that divides {count}"
            )


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each process of `mesh` (of one dimension) its part of every layer's experts, in place.

    The loss of a process must be that of its tokens, and gradients must be averaged over all processes as usual:
    gradients of an expert, which come from all processes of `mesh`, are divided by their number here.

    Args:
        model: equal on every process, with a number of experts that `check_experts` accepts.
    """
    for module in stacked_experts(model).values():
        inner = copy.copy(module)
        inner.num_experts = _count(module) // mesh.size()
        for name, weight in list(module.named_parameters()):
            part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, weight.requires_grad))
        module.forward = _Dispatch(module, inner, mesh)


class _Dispatch:
    """The forward of a module whose experts lie on several processes.

    Attributes:
        inner: the module with the experts of this process alone; a call puts their weights in.
    """

    def __init__(self, module: Any, inner: Any, mesh: DeviceMesh) -> None:
        self.module, self.inner, self.mesh = module, inner, mesh

    @torch.compiler.disable(reason="messages are of sizes that only the host knows")
    def __call__(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        group, ranks, here = self.mesh.get_group(), self.mesh.size(), self.inner.num_experts
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(ranks * here).index_add_(0, flat, torch.ones_like(flat))
        received = collectives.all_to_all_single(counts, None, None, group).view(ranks, here)
        # The one moment at which the host waits for the device: it has to know the sizes of the messages.
        out, into = torch.stack([counts.view(ranks, here).sum(1), received.sum(1)]).tolist()
        inner = self._with_weights()
        tokens = hidden_states[order // chosen.shape[1]].to(next(inner.parameters()).dtype)
        tokens = collectives.all_to_all_single(tokens, into, out, group)
        experts = torch.arange(here, device=chosen.device).repeat(ranks)
        experts = experts.repeat_interleave(received.flatten(), output_size=len(tokens))
        if not len(tokens):
            # Without a token this process would have no graph, and take no part in the messages of backward.
            tokens, experts = F.pad(tokens, (0, 0, 0, 1)), experts.new_zeros(1)
        # Not a call, which would run the hooks of the module, FSDP2's among them, once more.
        results = inner.forward(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))[: sum(into)]
        results = collectives.all_to_all_single(results, out, into, group)[order.argsort()]
        weighted = results.unflatten(0, chosen.shape) * weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _with_weights(self) -> Any:
        """Return the inner module with this process's experts, as plain tensors."""
        inner, weights = copy.copy(self.inner), dict[str, Tensor]()
        for name, parameter in self.module.named_parameters():
            weights[name] = parameter.to_local()
            if weights[name].requires_grad:
                # FSDP2 could divide (`set_gradient_divide_factor`), but in a group of one it does so twice for fp64 and
                # fp16 (torch 2.13, foreach_reduce).
                weights[name].register_hook(lambda gradient: gradient / self.mesh.size())
        inner.__dict__["_parameters"] = weights
        return inner.train(self.module.training)
