"""Experts of one process, and layouts that are refused; several processes are in test_two_ranks.py."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import model_of
from tiny import K3
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from attnres import UserError
from attnres.head import called_losses
from attnres.models.families import FAMILIES
from attnres.scale.experts import check_experts, distribute_experts, stacked_experts
from attnres.training import from_dict
from attnres.training.prepare import check

MLA = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SMALL: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 8}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "moe_intermediate_size": 8, **MLA}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**SMALL, "shared_expert_intermediate_size": 8},
    "qwen3_moe": SMALL,
    "qwen3_next": {**SMALL, "shared_expert_intermediate_size": 8, "head_dim": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 8, "head_dim": 8},
    "deepseek_v3": {**LOCAL, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "kimi_linear": {**LOCAL, "linear_head_dim": 8, "linear_num_heads": 2},
    "kimi_k3": K3,
}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.quick("gpt_oss", "kimi_k3")
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_every_family_are_found_and_called(group, family):
    """A mesh of one process has all experts, to which the same tokens go in another order."""
    counts = ("num_experts", "num_local_experts")
    configs = {name: AutoConfig.for_model(name) for name in FAMILIES}
    assert {name for name, of in configs.items() if any(hasattr(of, count) for count in counts)} == set(MIXTURES)
    size = {"family": family, **MIXTURES[family]}
    whole, model = (model_of({"size": size}) for _ in range(2))
    names = list(stacked_experts(model))
    assert names and all(name.endswith("mlp.experts") for name in names)
    distribute_experts(model, init_device_mesh("cpu", (1,)))
    assert list(stacked_experts(model)) == names
    ids = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(5))
    for one in (whole, model):
        called_losses(one, {"input_ids": ids[:, :-1]}, ids[:, 1:], "whole").sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        if theirs.grad is not None:
            gradient = ours.grad.full_tensor() if ".experts." in name and "shared" not in name else ours.grad
            torch.testing.assert_close(gradient, theirs.grad, rtol=1e-6, atol=1e-6, msg=name)  # routers have fp32


def test_experts_that_do_not_divide_are_refused():
    model = model_of({"size": {"family": "mixtral", "num_local_experts": 6}})
    check_experts(model, 3)
    for ep in (4, 12):
        with pytest.raises(UserError, match=rf"ep is {ep} .* has 6 experts"):
            check_experts(model, ep)
    with pytest.raises(UserError, match="Linear has no layers of stacked experts"):
        check_experts(torch.nn.Linear(2, 2), 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"shard": 4, "ep": 3}, r"parallel.ep is 3 and parallel.shard is 4"),
        ({"ep": 2}, r"parallel.ep is 2 and parallel.shard is 1"),
        ({"shard": 2, "ep": 0}, "parallel.ep is 0"),
        ({"shard": 2, "ep": 2, "tp": 2}, "parallel.ep and parallel.tp"),
        ({"shard": 2, "ep": 2, "cp": 2}, "parallel.ep and parallel.cp"),
        ({"shard": 2, "ep": 2, "pp": 2, "pp_schedule": "zbv"}, "parallel.ep is 2 and parallel.pp_schedule is zbv"),
    ],
)
def test_layouts_without_experts_of_their_own_are_refused(values, said):
    with pytest.raises(UserError, match=said):
        check(from_dict({"parallel": values, "accumulation": 4, "batch_size": 16}), world_size=8)
