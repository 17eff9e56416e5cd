"""A mixture whose experts lie on several processes, held against the same model in this one: for the launches of this
folder."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import apply_expert_parallelism

from attnres.head import called_losses
from attnres.models import build
from attnres.scale.experts import distribute_experts, stacked_experts
from attnres.scale.shard import mean_gradients, shard

SIZE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZE |= {"intermediate_size": 24, "num_experts_per_tok": 2}
WORDS, TOKENS = 31, 7


def model_of(case: dict[str, Any]) -> Any:
    """A model whose parameters have left their start values, in `case["dtype"]` or fp64.

    `case["skewed"]`: routers give every token to the first experts, which lie on the first process.
    """
    size = {**SIZE, **case["size"]}
    model = build(size, "block", vocab_size=WORDS, max_positions=32, settings={"block_size": 2})
    model = model.to(getattr(torch, case.get("dtype", "float64"))).train()
    model.set_experts_implementation(case.get("implementation", "eager"))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter) * 0.2)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if case.get("skewed") and name.endswith(("router.bias", "e_score_correction_bias")):
                tensor[: size["num_experts_per_tok"]] += 100
    return model


def run_experts(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of the loss and of gradients (relative to the largest of a parameter), tokens of each expert in each
    layer, and messages of the forward and of the backward pass a layer.

    The model is sharded too, as in training, with `case["ep"]` processes that have different experts.
    """
    ranks, rank, ep = dist.get_world_size(), dist.get_rank(), case["ep"]
    whole, model = model_of(case), model_of(case)
    mesh = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("shard", "ep"))
    distribute_experts(model, mesh["ep"])
    shard(model, model, init_device_mesh("cpu", (ranks,)), experts=mesh["shard"])
    experts = list(stacked_experts(model).values())
    loads: list[torch.Tensor] = []
    for module in experts:
        module.register_forward_pre_hook(lambda module, args: loads.append(_loads(module.num_experts, args[1])))
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randint(WORDS, (2 * ranks, TOKENS), generator=draw) for _ in "xy")
    loss = called_losses(whole, {"input_ids": x}, y, "whole").sum() / y.numel()
    loss.backward()
    here = slice(2 * rank, 2 * rank + 2)
    with Sent() as forward:
        part = called_losses(model, {"input_ids": x[here]}, y[here], "whole").sum() / y[here].numel()
    with Sent() as backward:
        part.backward()
    mean_gradients(model.residual.parameters(), dist.group.WORLD)
    errors = {}
    for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            errors[name] = ((full - other.grad).abs().max() / other.grad.abs().max().clamp_min(1e-30)).item()
    mean = part.detach().clone()
    dist.all_reduce(mean)
    return {
        "gradient": max(errors.values()),
        "loss": abs(mean / ranks - loss).item(),
        "loads": [load.tolist() for load in loads],
        "messages": [count.messages / len(experts) for count in (forward, backward)],
    }


def _loads(count: int, chosen: torch.Tensor) -> torch.Tensor:
    """How many tokens of all processes chose each expert."""
    loads = chosen.flatten().bincount(minlength=count)
    dist.all_reduce(loads)
    return loads


class Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts all-to-alls as `messages`."""

    messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.messages += "all_to_all" in str(func)
        return func(*args, **(kwargs or {}))


def run_second_opinion(case: dict[str, Any]) -> float:
    """The largest relative difference of gradients, and of losses, from the same model whose experts Transformers
    distributes."""
    ranks = dist.get_world_size()
    ours, theirs = model_of(case), model_of(case)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    distribute_experts(ours, mesh)
    single = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "tp"))["tp"]
    plan: dict[str, str] = {}
    for name, module in stacked_experts(theirs).items():
        plan |= {f"{name}.{of}": "grouped_gemm" for of, _ in module.named_parameters()} | {name: "ep_dispatch_experts"}
    apply_expert_parallelism(theirs, mesh, single, plan, "all_to_all")
    draw = torch.Generator().manual_seed(5 + dist.get_rank())
    x, y = (torch.randint(WORDS, (2, TOKENS), generator=draw) for _ in "xy")
    losses = [called_losses(model, {"input_ids": x}, y, "whole").sum() for model in (ours, theirs)]
    worst = abs(losses[0] - losses[1]).item()
    for loss in losses:
        loss.backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if a.grad is not None:
            mine, other = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in (a.grad, b.grad))
            factor = ranks if ".experts." in name else 1  # which averaging over processes divides theirs by
            worst = max(worst, ((mine * factor - other).abs().max() / other.abs().max().clamp_min(1e-30)).item())
    return worst
