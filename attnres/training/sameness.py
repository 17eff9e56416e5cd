"""Whether two runs are one: what may change between a run and its resumption, and what is said of the rest."""

from collections.abc import Mapping
from typing import Any

from attnres.errors import UserError
from attnres.training.check import unused
from attnres.training.config import TrainConfig, to_dict
from attnres.typed import leaves

FREE = (
    *("out", "name", "resume", "track", "save_every", "keep_at", "device", "allow_different"),
    *("accumulation", "gradient_checkpointing", "loss", "cuda_graphs", "recompute_reads"),
)
"""Fields that may change between a run and its resumption, as those of `parallel` may; only `device`, `parallel`,
`accumulation`, `loss`, `gradient_checkpointing` and `cuda_graphs` change numbers, by their rounding. `recompute_reads`
was an earlier version's `gradient_checkpointing` reads."""
_CONTENT = "model.residual_sha256"


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `to_dict` form that decide what a run computes, by dotted name; what an earlier version
    did not have it did as by default."""
    fields = {**dict(leaves(to_dict(TrainConfig()))), **dict(leaves(values))}
    return {n: value for n, value in fields.items() if n not in FREE and not n.startswith("parallel.")}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Dotted names of the fields in which two `to_dict` forms differ and which change what is computed."""
    left, right = deciding(ours), deciding(theirs)
    names = list(dict.fromkeys([*left, *right]))
    if None in (left.get(_CONTENT), right.get(_CONTENT)):  # an earlier version wrote none
        names = [name for name in names if name != _CONTENT]
    if left["finetune.init_from"] and right["finetune.init_from"]:  # an earlier version wrote a size then too
        names = [name for name in names if name.split(".")[:2] != ["model", "size"]]
        if left["finetune.init_from"] in (left.get("data.tokenizer"), right.get("data.tokenizer")):
            names.remove("data.tokenizer")  # of which it wrote where the hub's was cached: data.json tells them apart
    neither = unused(left).keys() & unused(right).keys()
    differ = [name for name in names if left.get(name) != right.get(name) and name not in neither]
    return [name for name in differ if not any(name.startswith(f"{whole}.") for whole in differ)]


def same_configuration(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Refuse to continue a run with another configuration, naming the fields that differ and both values."""
    changed = differences(ours, theirs)
    file = _at(ours, "model.residual_file")
    if "model.residual_sha256" in changed and file == _at(theirs, "model.residual_file"):
        raise UserError(f"{where} is of another content of {file}: restore it or start a new run in another folder")
    if changed:
        pairs = "; ".join(f"{name} is {_at(ours, name)!r} here, {_at(theirs, name)!r} there" for name in changed)
        raise UserError(
            f"{where} belongs to another configuration: {pairs}; use the same values or start a new run in "
            "another folder"
        )


def same_text(ours: dict[str, Any], theirs: Any, where: str) -> None:
    """Refuse to continue a run on other data than `theirs` (`attnres.training.data.data_record`): UserError."""
    if ours != theirs:
        raise UserError(
            f"{where} was trained on other data: the text or the tokenizer under the same source have changed since; "
            "restore them or start a new run in another folder"
        )


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
