"""Parameter groups for depth reads in an existing optimizer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.residuals.base import Residual
from attnres.residuals.queries import QUERY_LR, Queried

MARK = "attnres"
"""Field of a parameter group that `regroup` made: "read" or "residual"."""


def regroup(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], model: nn.Module, rate: float = QUERY_LR
) -> None:
    """Move the residuals' parameters of a model into groups of their own: no weight decay, no Muon, slow queries.

    >>> from torch import nn
    >>> from attnres.residuals import make_residual
    >>> model = nn.ModuleDict({"mlp": nn.Linear(8, 8), "depth": make_residual("full", 4, 8)})
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    >>> regroup(optimizer, model)
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.001, 0.1), (0.0001, 0.0)]

    Rules by the number of dimensions mistake queries and gains, (reads, d), for matrices. A new group has the settings
    of the group that its parameters were in. Queries and gains get `rate` times that group's learning rate, unless the
    setting `query_lr` already slows them: exactly one of the two applies. If a group that holds only reads has a lower
    rate than the rest, the user has slowed them: it keeps that rate or, if `query_lr` slows them, gets the rest's.

        optimizer = model.configure_optimizers(...)     # somebody else's
        attnres.regroup(optimizer, model)               # again after a checkpoint is loaded: it changes nothing
        scheduler = LambdaLR(optimizer, ...)

    Call it before creating a scheduler, and before loading the state of a regrouped optimizer. It works with FSDP2's
    parameters.

    Args:
        optimizer: one or several optimizers. With several, parameters move from Muon to the first that is not Muon.
        rate: learning rate relative to that of the group that a query was in.

    Raises:
        UserError: the optimizer lacks a trainable parameter of a residual, already has a scheduler, or is Muon without
            another optimizer.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    kinds = _kinds(model)
    grouped = {id(p) for optim in optimizers for group in optim.param_groups for p in group["params"]}
    missing = [
        name for name, p in model.named_parameters() if id(p) in kinds and p.requires_grad and id(p) not in grouped
    ]
    if missing:
        raise UserError(
            f"the optimizer does not have '{missing[0]}', which would never train: create it from all parameters of "
            "the model, after it has depth reads"
        )
    rest = _fastest(optimizers, kinds)
    for optim in optimizers:
        for group in list(optim.param_groups):
            moved = [p for p in group["params"] if id(p) in kinds]
            if not moved or MARK in group:
                continue
            if hasattr(optim.step, "_wrapped_by_lr_sched"):
                raise UserError("the optimizer has a scheduler, which ignores new groups: create it after regroup")
            home, fields = _home(optimizers, optim, group)
            slowed = len(moved) == len(group["params"]) and not is_muon(optim, group) and 0 < float(group["lr"]) < rest
            factors = {"slow": rate, "read": 1.0, "residual": 1.0}
            if slowed:
                factors = {"slow": 1.0, "read": rest / float(group["lr"]), "residual": 1.0}
            group["params"] = [p for p in group["params"] if id(p) not in kinds]
            if home is not optim or fields.get("use_muon") != group.get("use_muon"):
                for parameter in moved:  # Adam cannot continue from a momentum that was orthogonalised
                    optim.state.pop(parameter, None)
            for kind, mesh in dict.fromkeys((kinds[id(p)], _mesh(p)) for p in moved):
                part = [p for p in moved if (kinds[id(p)], _mesh(p)) == (kind, mesh)]
                lr = {key: fields[key] * factors[kind] for key in ("lr", "initial_lr") if key in fields}
                name = "residual" if kind == "residual" else "read"
                home.add_param_group({**fields, **lr, "params": part, "weight_decay": 0.0, MARK: name})


def _kinds(model: nn.Module) -> dict[int, str]:
    """Return the kind of each residual's parameters, by id: "slow" (their group slows them), "read" or "residual"."""
    kinds: dict[int, str] = {}
    for module in (module for module in model.modules() if isinstance(module, Residual)):
        kind = "read" if isinstance(module, Queried) and module.query_lr != 1.0 else "slow"
        kinds |= {id(p): kind if name in module.slow else "residual" for name, p in module.named_parameters()}
    return kinds


def _fastest(optimizers: Iterable[torch.optim.Optimizer], kinds: Mapping[int, str]) -> float:
    """Return the highest learning rate of groups outside Muon that hold other parameters than the residuals'; 0 without
    any."""
    groups = [group for one in optimizers for group in one.param_groups if not is_muon(one, group)]
    return max((float(g["lr"]) for g in groups if any(id(p) not in kinds for p in g["params"])), default=0.0)


def _home(
    optimizers: Iterable[torch.optim.Optimizer], former: torch.optim.Optimizer, group: dict[str, Any]
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Return the optimizer for a group's moved parameters, and the fields of their new group."""
    candidates = [(former, group), *((one, other) for one in optimizers for other in one.param_groups)]
    for one, fields in candidates:
        if not is_muon(one, fields) and MARK not in fields:
            return one, {key: value for key, value in fields.items() if key not in ("params", "param_names")}
    if "fallback_lr_scale" in group:  # timm's Muon uses AdamW for groups with this field
        return former, {key: value for key, value in group.items() if key != "params"} | {"use_muon": False}
    raise UserError(
        f"{type(former).__name__} has queries and gains, which it would make orthogonal, and there is no other "
        "optimizer: give regroup both, [muon, adamw]"
    )


def is_muon(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the optimizer orthogonalises the updates of this group."""
    # optimizers of both kinds mark a group: nanochat by `kind`, Keller Jordan by `use_muon`
    if "kind" in group:
        return group["kind"] == "muon"
    return group.get("use_muon", "muon" in type(optimizer).__name__.lower())


def _mesh(parameter: Tensor) -> Any:
    """Return a DTensor's device mesh, since an optimizer cannot step plain tensors and DTensors in one group."""
    return getattr(parameter, "device_mesh", None)
