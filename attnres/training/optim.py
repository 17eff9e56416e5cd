"""Build the optimizers and their learning rates; a parameter's group follows from its *role*, not from its shape.

    kind        what it is                             optimizer             weight decay
    read        queries of depth reads, keys' gains    AdamW, own group      no
    residual    everything else of the residual        AdamW, own group      no
    vector      norm weights, biases, scalars, A_log   AdamW                 no
    embedding   token and position tables              AdamW                 no
    head        an untied output projection            AdamW                 yes
    lora        low-rank changes of frozen matrices    AdamW                 yes
    matrix      every other weight                     AdamW or Muon         yes

Muon trains matrices of two dimensions and stacked experts, each of which is a matrix; AdamW trains the rest.

Why the residual has separate groups: pseudo-queries and gains are stored as (reads, d) tensors, which a rule by rank
would mistake for weight matrices. Decay would pull the queries back to zero, that is to the uniform mean
(`optim.residual_decay` does so on request, for queries only), and Muon would mix the queries of different sublayers by
making the tensor's rows orthogonal.

Why embeddings are not decayed: a row gets a gradient only when its token occurs, but decay would act at every step,
so rare tokens would fade; and the embedding is the first source, so its scale is part of what the depth reads compare.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from attnres.residuals import Residual
from attnres.residuals.queries import Queried
from attnres.training.config import READ_RATE, OptimConfig
from attnres.training.finetune import is_adapter
from attnres.training.muon import OwnedMuon, StackedMuon

QUERY, QUERY_WEIGHT = "query", "query_weight"
"""Last part of the names of pseudo-queries, and of weights that compute queries from the input, in every mechanism."""


@dataclass(frozen=True)
class Transfer:
    """How a model's width changes learning rates and start values found at another width: muP (arXiv 2203.03466, table
    8).

    With m = width / `optim.base_width`:

        what                                     start value       rate
        matrices under AdamW                     / sqrt(m)         / m
        matrices under Muon                      / sqrt(m)         / sqrt(m)
        the final norm's gain, once 1            1 / m             / m
        queries of a `slow` read, their makers   as they are       / m
        embedding, untied head, everything else  as they are       as they are

    Weight decay is multiplied by the divisor of its learning rate, so that a step decays by the same amount. Reasons:

    - An update of AdamW has entries of one size, and d of them act together: its effect grows as the width.
    - Muon's is orthogonal and scaled to the RMS of AdamW's, so that its largest singular value grows as the square
      root.
    - muP divides the logits by m. Here the final norm's gain does: the same function, updates and all, in any family,
      with tied embeddings too, and a saved model needs no code for it.
    - A pseudo-query is an output weight: d products of one sign add up to a logit.

    Heads must have the same width in both models, otherwise attention's 1 / sqrt(d) would have to change too.
    CompleteP, the analogue for depth, is the residual `completep`; depth reads have no growing sum.

    Attributes:
        ratio: m. final: names of the parameters of the final norm.
        query_lr: the factor of the learning rate by which queries and gains are stored (the setting of that name).
    """

    ratio: float = 1.0
    final: frozenset[str] = field(default_factory=frozenset)
    query_lr: float = 1.0

    @classmethod
    def of(cls, model: Any, base_width: int | None) -> "Transfer":
        """Return the transfer for a model of this package; for any model without a base width, one that changes
        nothing."""
        query_lr = next((part.query_lr for part in model.modules() if isinstance(part, Queried)), 1.0)
        if base_width is None:
            return cls(query_lr=query_lr)
        final_norm_ids = {id(parameter) for parameter in _final_norm(model).parameters()}
        final = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in final_norm_ids)
        return cls(model.residual("itself").width / base_width, final, query_lr)

    def divisor(self, kind: str, name: str, *, muon: bool = False) -> float:
        """Return the divisor of the learning rate of a parameter of this kind and name."""
        last = name.rpartition(".")[2]
        if kind == "matrix":
            return math.sqrt(self.ratio) if muon else self.ratio
        carried = name in self.final or (kind == "read" and last in (QUERY, QUERY_WEIGHT))
        return self.ratio if carried else 1.0


def carry_start(model: Any, base_width: int | None, names: Mapping[str, list[str]]) -> None:
    """Change the start values of a new model in place; `names` are its parameters by kind."""
    transfer = Transfer.of(model, base_width)
    if transfer.ratio == 1:
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names["matrix"]:
            parameters[name].div_(math.sqrt(transfer.ratio))
        gain = _final_norm(model).weight
        assert isinstance(gain, Tensor)
        gain.add_(1 / transfer.ratio - 1)  # a gain is stored as 1, or as 0 to which 1 is added


def _final_norm(model: Any) -> nn.Module:
    return model.depth_base.get_submodule(model.family.final_norm)


KINDS = ("read", "residual", "vector", "embedding", "head", "lora", "matrix")
OF_RESIDUAL = ("read", "residual")
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
VECTORS = ("bias", "A_log")
"""Ends of the names of parameters that count as vectors or scalars whatever their shape: experts' biases are one
tensor."""


def kinds(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the trainable parameters of `model` by kind: read, residual, vector, embedding, head, lora,
    matrix.

    The residual's parameters are those of `model.residual` or of a `Residual` anywhere in the model; reads are those in
    its `slow`. A parameter shared by two modules (tied embeddings) counts once.
    """
    mechanisms = [module for module in model.modules() if isinstance(module, Residual)]
    attached = getattr(model, "residual", None)
    homes = [*mechanisms, *([attached] if isinstance(attached, nn.Module) else [])]
    residual = {id(parameter) for module in homes for parameter in module.parameters()}
    slow = {id(p) for module in mechanisms for name, p in module.named_parameters() if name in module.slow}
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    find_head = getattr(model, "get_output_embeddings", None)
    output = find_head() if callable(find_head) else None
    head = {id(parameter) for parameter in output.parameters()} if isinstance(output, nn.Module) else set()
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in residual:
            kind = "read" if id(parameter) in slow else "residual"
        elif is_adapter(name):
            kind = "lora"
        elif parameter.ndim < 2 or name.endswith(VECTORS):
            kind = "vector"
        elif id(parameter) in tables:
            kind = "embedding"
        elif id(parameter) in head:
            kind = "head"
        else:
            kind = "matrix"
        names[kind].append(name)
    return names


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Return AdamW over every group of a model's parameters, or AdamW and Muon; see `optimizers_of`."""
    transfer = Transfer.of(model, config.base_width)
    return optimizers_of(dict(model.named_parameters()), kinds(model), config, transfer)


def optimizers_of(
    parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Sequence[str]], config: OptimConfig, transfer: Transfer
) -> list[torch.optim.Optimizer]:
    """Return AdamW, or AdamW and Muon, over the `parameters` that are in `kinds`, with learning rates adapted to the
    model's width.

    Each group holds `kind`, `names` (of its parameters, in order) and `peak_lr`, which `set_learning_rate` scales.
    AdamW is fused where PyTorch has it for the model's device. Muon's updates are scaled to the RMS of AdamW's
    (`match_rms_adamw`, arXiv 2502.16982), so that its learning rate and decay mean the same.
    """
    adamw: list[dict[str, Any]] = []
    muon: list[dict[str, Any]] = []
    for kind, every in kinds.items():
        names = [name for name in every if name in parameters]
        decay = config.weight_decay if kind in ("head", "lora", "matrix") else 0.0
        has_muon = config.optimizer == "muon" and kind == "matrix"
        orthogonal = [name for name in names if has_muon and _is_orthogonalised(name, parameters[name])]
        plain: dict[tuple[float, float], list[str]] = {}
        for name in [name for name in names if name not in orthogonal]:
            # Queries are decayed if asked for, towards the uniform mean.
            pull = config.residual_decay if kind in OF_RESIDUAL and name.endswith(QUERY) else decay
            divisor = transfer.divisor(kind, name)
            rates = (_adamw_rate(kind, config, transfer.query_lr) / divisor, pull * divisor)
            plain.setdefault(rates, []).append(name)
        divisor = transfer.divisor(kind, "", muon=True)
        for groups, members, lr, pull in (
            *((adamw, members, *rates) for rates, members in plain.items()),
            (muon, orthogonal, config.muon_lr / divisor, decay * divisor),
        ):
            for alike in _alike(members, parameters):
                group = {"params": [parameters[name] for name in alike], "names": alike, "kind": kind}
                groups.append({**group, "weight_decay": pull, "lr": lr, "peak_lr": lr})
    fused = all(p.device.type in FUSED_DEVICES for group in adamw for p in group["params"])
    optimizers: list[torch.optim.Optimizer] = []
    if adamw:
        optimizers.append(torch.optim.AdamW(adamw, betas=config.betas, fused=fused))
    if muon:
        sharded = any(isinstance(p, DTensor) for group in muon for p in group["params"])
        muon_class = OwnedMuon if sharded else StackedMuon
        optimizers.append(muon_class(muon, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def _is_orthogonalised(name: str, parameter: Tensor) -> bool:
    """Return whether Muon trains a weight: a matrix, or experts that are whole on every process."""
    if parameter.ndim == 2:
        return True
    places = parameter.placements if isinstance(parameter, DTensor) else ()
    # By their axis: of distributed experts (ep) torch places the shards as `_StridedShard`, which `is_shard` denies.
    whole = all(place.is_replicate() or getattr(place, "dim", None) == 0 for place in places)
    return parameter.ndim == 3 and "experts" in name and whole


def _adamw_rate(kind: str, config: OptimConfig, query_lr: float = 1.0) -> float:
    """Return AdamW's peak learning rate for a kind. One of three rules applies: `residual_lr`, `query_lr`, or
    `READ_RATE`."""
    if kind not in OF_RESIDUAL:
        return config.lr
    if config.residual_lr is not None:
        # the learning rate of w itself, not of w / query_lr
        return config.residual_lr / (query_lr if kind == "read" else 1.0)
    return config.lr * READ_RATE if kind == "read" and query_lr == 1.0 else config.lr


def _alike(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names grouped by the placement of their parameters: one step cannot mix plain tensors and DTensors."""
    places: dict[Any, list[str]] = {}
    for name in names:
        parameter = parameters[name]
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        places.setdefault(mesh, []).append(name)
    return list(places.values())


def set_learning_rate(optimizers: list[torch.optim.Optimizer], fraction: float) -> None:
    """Set every group's learning rate to `fraction` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group["peak_lr"] * fraction
            if isinstance(group["lr"], Tensor):  # a captured step reads it from the tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


# ------------------------------------------------------------------ state as named tensors


def state_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' state, flat: `PARAMETER::ENTRY` -> tensor (AdamW and Muon store only tensors)."""
    flat = {}
    for optimizer in optimizers:
        for name, parameter in _named(optimizer):
            for entry, value in optimizer.state.get(parameter, {}).items():
                flat[f"{name}::{entry}"] = value.detach().contiguous()
    return flat


def load_state_tensors(optimizers: list[torch.optim.Optimizer], flat: dict[str, Tensor]) -> None:
    """Load the result of `state_tensors`; a parameter that never had a gradient has no state. A sharded parameter takes
    its shard of unsharded tensors.

    Raises KeyError for a parameter that the optimizers do not know, ValueError for a shape that differs.
    """
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        name, entry = entry_of(key)
        entries.setdefault(name, {})[entry] = value
    for optimizer in optimizers:
        state = {}
        for index, (name, parameter) in enumerate(_named(optimizer)):
            if name not in entries:
                continue
            state[index] = entries.pop(name)
            for entry, value in state[index].items():
                if value.ndim and value.shape != parameter.shape:
                    raise ValueError(f"{name}::{entry} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
                if value.ndim and isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                    state[index][entry] = distribute_tensor(
                        value, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if entries:
        raise KeyError(next(iter(entries)))


def empty_state(optimizers: list[torch.optim.Optimizer], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return zeros to be filled for these entries of `state_tensors`, for the parameters that the optimizers have."""
    parameters = {name: parameter for optimizer in optimizers for name, parameter in _named(optimizer)}
    flat = {}
    for key, shape in shapes.items():
        parameter = parameters.get(entry_of(key)[0])
        if parameter is not None:
            like = tuple(shape) == tuple(parameter.shape) and parameter.ndim > 0
            flat[key] = torch.zeros_like(parameter) if like else torch.zeros(tuple(shape))
    return flat


def entry_of(key: str) -> tuple[str, str]:
    """Split `PARAMETER::ENTRY`."""
    name, _, entry = key.rpartition("::")
    return name, entry


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"])


# ------------------------------------------------------------------ schedule


def scheduled_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Return the fraction of its peak for every learning rate at update `step` of a run of `steps`.

    It rises linearly from 1 / w at the first update to 1 at update w, the last of the warm-up, and ends at the floor,
    `min_lr_ratio`:

        cosine   floor + (1 - floor) (1 + cos(pi p)) / 2,   p = (step - w) / (steps - w)
        wsd      1 until the last `decay` of the steps, then a line down to the floor

    >>> [round(scheduled_rate(step, 4, OptimConfig(warmup=0, min_lr_ratio=0)), 3) for step in (1, 2, 4)]
    [0.854, 0.5, 0.0]
    >>> optim = OptimConfig(schedule="wsd", warmup=0.2, decay=0.4, min_lr_ratio=0)
    >>> [scheduled_rate(step, 10, optim) for step in (1, 2, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warm, floor = round(optim.warmup * steps), optim.min_lr_ratio
    falling = steps - warm if optim.schedule == "cosine" else min(round(optim.decay * steps), steps - warm)
    if step <= steps - falling:
        return min(1.0, step / warm) if warm else 1.0
    if optim.schedule == "cosine":
        progress = min(1.0, (step - warm) / falling)
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    return floor + (1 - floor) * max(0.0, (steps - step) / falling)
