"""Weights of other projects' checkpoints under our names, and those of our models under theirs."""

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from attnres.errors import UserError, foreign
from attnres.models.bases import DepthMixin
from attnres.models.classes import CLASSES
from attnres.models.foreign import format_of
from attnres.models.foreign.format import Format, Stored, WrittenFormat
from attnres.residuals import Residual
from attnres.residuals.queries import Queried
from attnres.text import first_of

_log = logging.getLogger("attnres")

_READ = re.compile(r"(_res_(proj|norm|bias|gate_logit|gate_proj|alpha)|\.res_(proj|norm)|depth_attn\.)")
"""Matches the names of the tensors of depth reads in all formats."""
_WRAPPERS = ("_orig_mod.", "language_model.")  # of torch.compile, and of a model with a vision tower
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
"""Of tensors in safetensors that are weights, or weights in fewer bits."""


def foreign_config(name: str, fields: dict[str, Any]) -> Any:
    """Return our config for the checkpoint called `name`; its `foreign_config` is the checkpoint's.

    Args:
        fields: its config.json.

    Raises:
        UserError: fields of two formats, or values that no class of this package computes.
    """
    kind = format_of(name, fields)
    with foreign(f"config.json of {name} is no valid one of format '{kind.name}'", "copy it again"):
        target = kind.read(fields)
    config_class: Any = CLASSES[target.family][0]
    skipped = ("model_type", "architectures", "auto_map", "transformers_version")
    ours = {field: value for field, value in target.fields.items() if field not in skipped}
    with foreign(f"config.json of {name} is no valid {target.family} config", "copy it again"):
        config = config_class.from_dict({**ours, "residual": target.residual, "residual_settings": target.settings})
    config.foreign_config = kind.kept(fields)
    return config


def assemble(
    name: str, fields: dict[str, Any], config: Any, files: Sequence[Path], dtype: torch.dtype | str, **options: Any
) -> DepthMixin:
    """Return the model of the checkpoint called `name`, in evaluation mode.

    Args:
        fields, config: its config.json, and the result of `foreign_config`.
        files: its safetensors.
        dtype: of the weights, "auto" for that of the stored token embedding; the residual's are fp32.
        options: for `from_pretrained`.

    Raises:
        UserError: tensors that are missing, left over or of another shape, or those of another format.
    """
    kind = format_of(name, fields)
    with torch.device("meta"):
        residual = config.make_residual()
    tensors = kind.decoder(_unwrapped(_stored(files, name), kind, name), config, fields, name)
    if not isinstance(dtype, torch.dtype):
        table = tensors.get(kind.theirs(kind.table, config))
        dtype = table.dtype if table is not None and table.dtype is not None else torch.float32
    reads = _gathered(tensors, kind, residual, name)
    state: dict[str, Any] = dict(_renamed(tensors, kind, config, dtype, name))
    model_class: Any = CLASSES[config.model_type.removeprefix("attnres_")][1]
    place = f"{model_class.base_model_prefix}.residual."
    state.update({place + ours: tensor for ours, tensor in reads.items()})
    with foreign(f"the weights of {name} do not fit its config", "copy it again"):
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **options
        )
    missing = {key for key in info["missing_keys"] if not key.endswith(kind.optional)}
    for problem, keys in (("lacks", missing), ("has, besides what its format has,", info["unexpected_keys"])):
        if keys:
            these = first_of(sorted(kind.theirs(key, config) for key in keys), "other tensor")
            raise UserError(f"{name} {problem} {these}: is it whole, and in the format '{kind.name}'?")
    with torch.no_grad():
        for key in info["missing_keys"]:  # biases that this model does not have
            model.get_parameter(key).zero_()
    return model.eval()


def foreign_state(model: DepthMixin, kind: WrittenFormat) -> dict[str, Tensor]:
    """Return the model's tensors, or parts of them, under their foreign names.

    Tensors of reads are in the weights' dtype if that loses nothing, else in fp32; a gate or bias that our model lacks
    is zero.
    """
    table: Any = model.get_input_embeddings().weight
    inner = model.residual("itself")
    residual, state = inner.state_dict(), {}
    if isinstance(inner, Queried):
        residual |= {"query": inner.queries.detach(), "gain": inner.gains.detach()}
    for row in kind.rows(model.residual):
        tensor = residual[row.ours][row.index].reshape(row.shape) if row.ours in residual else torch.zeros(row.shape)
        narrow = tensor.to(table.dtype)
        state[row.theirs] = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
    for ours, tensor in model.state_dict().items():
        tied = ours == "lm_head.weight" and model.config.tie_word_embeddings
        if tied or ".residual." in ours:
            continue
        stack = kind.stack(ours, model.config)
        if stack is None:
            state[kind.theirs(ours, model.config)] = tensor
        else:
            rows = tensor.flatten(0, 1) if stack.groups else tensor
            state |= zip(stack.names, rows.chunk(len(stack.names)), strict=True)
    state = kind.written(state, model.config)
    return {name: tensor.detach() for name, tensor in state.items()}


def _stored(files: Sequence[Path], source: str) -> dict[str, Stored]:
    """Return the tensors in these files without reading them."""
    tensors: dict[str, Stored] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118
            if name in tensors:
                raise UserError(f"{source} has '{name}' in two files: copy it again, into an empty folder")
            part = opened.get_slice(name)
            read = functools.partial(opened.get_tensor, name)
            tensors[name] = Stored(read, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))
    return tensors


def _unwrapped(tensors: dict[str, Stored], kind: Format, source: str) -> dict[str, Stored]:
    """Return the tensors of a decoder of text without a prefix that all their names have."""
    if beside := {name for name in tensors if name.startswith(kind.beside)}:
        _log.warning(
            "%s has more than a decoder of text, which alone is loaded: %s are left out",
            source,
            first_of(sorted(beside), "other tensor"),
        )
        tensors = {name: tensor for name, tensor in tensors.items() if name not in beside}
    for wrapper in _WRAPPERS:
        wrapped = [name for name in tensors if name.startswith(wrapper)]
        if wrapped and len(wrapped) < len(tensors):
            other = next(name for name in tensors if not name.startswith(wrapper))
            raise UserError(f"{source} has '{wrapped[0]}' and '{other}': only a decoder of text is loaded")
        if wrapped:
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors


def _gathered(tensors: dict[str, Stored], kind: Format, residual: Residual, source: str) -> dict[str, Tensor]:
    """Return the residual's tensors by their names in it, and remove their parts from `tensors`."""
    rows = kind.rows(residual)
    missing = [row.theirs for row in rows if row.theirs not in tensors]
    unknown = [name for name in tensors if _READ.search(name) and name not in {row.theirs for row in rows}]
    if missing and unknown:
        raise UserError(
            f"{source} has depth reads named '{unknown[0]}' where '{kind.name}' names '{missing[0]}': its config and "
            "its weights are in two formats"
        )
    if missing:
        raise UserError(f"{source} lacks {first_of(missing, 'other tensor')} of depth reads")
    if unknown:
        raise UserError(
            f"{source} has {first_of(unknown, 'other tensor')} of depth reads, for which its config ('{kind.name}') "
            "has no place"
        )
    wide = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors.values()) else torch.float32
    gathered = {name: torch.empty(tensor.shape, dtype=wide) for name, tensor in residual.state_dict().items()}
    for row in rows:
        tensor, place = tensors.pop(row.theirs), gathered[row.ours][row.index]
        if [n for n in tensor.shape if n != 1] != [n for n in place.shape if n != 1]:
            raise UserError(
                f"'{row.theirs}' of {source} has shape {tensor.shape}: expected {row.shape}, as its config says"
            )
        place.copy_(tensor[...].reshape(place.shape))
    return gathered


def _renamed(
    tensors: Mapping[str, Stored], kind: Format, config: Any, dtype: torch.dtype, source: str
) -> dict[str, Stored]:
    """Return all other tensors under our names; those of a `Stack` become one, in `dtype`."""
    state: dict[str, Stored] = {}
    stacked: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        if name.endswith(kind.ignored):
            continue
        new = kind.ours(name, config)
        if new not in stacked and (stack := kind.stack(new, config)) is not None:
            stacked[new] = {*stack.names}
            if missing := [part for part in stack.names if part not in tensors]:
                raise UserError(f"{source} lacks {first_of(missing, 'other tensor')}: copy it again")
            state[new] = _stack({part: tensors[part] for part in stack.names}, stack.groups, dtype, source)
        if new in stacked:
            if name not in stacked[new]:
                raise UserError(f"{source} has '{name}', for which its config ('{kind.name}') has no place")
            continue
        if new in state:
            raise UserError(f"{source} has '{new}' under two names: its weights are in two formats")
        state[new] = _transposed(tensor) if new.endswith(kind.transposed) else tensor
    if config.tie_word_embeddings and "lm_head.weight" in state:
        head = state.pop("lm_head.weight")
        if not torch.equal(state.setdefault(kind.table, head)[...], head[...]):
            raise UserError(f"{source} ties its head to its embedding, and holds two that differ")
    return state


def _transposed(tensor: Stored) -> Stored:
    return Stored(lambda: tensor[...].t().contiguous(), tensor.shape[::-1], tensor.dtype)


def _stack(parts: Mapping[str, Stored], groups: int, dtype: torch.dtype, source: str) -> Stored:
    """Return the concatenation of these by rows, divided into groups, which reads one part at a time."""
    (rows, *others), *_ = (part.shape for part in parts.values())
    for name, part in parts.items():
        if part.shape != (rows, *others):
            raise UserError(
                f"'{name}' of {source} has shape {part.shape}: expected {(rows, *others)}, as '{next(iter(parts))}' has"
            )

    def read() -> Tensor:
        whole = torch.empty(len(parts), rows, *others, dtype=dtype)
        for place, part in zip(whole, parts.values(), strict=True):
            place.copy_(part[...])
        return whole.view(shape)

    count = len(parts) * rows
    shape = (groups, count // groups, *others) if groups else (count, *others)
    return Stored(read, shape, dtype)
