"""Checkpoints of other projects' depth reads as models of ours, and ours as theirs.

>>> model = load_foreign("wdlctc/open-attnres-block")       # doctest: +SKIP
>>> model.save_pretrained("models/open-attnres-block")      # doctest: +SKIP
>>> save_foreign(model, "exported", "open-attnres")         # doctest: +SKIP
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from attnres.errors import UserError, first_line, unknown
from attnres.files import refuse_full, replaced_folder, write_json
from attnres.models.classes import CLASSES, DepthMixin
from attnres.models.foreign_kind import Config, Kind, Row
from attnres.models.foreign_kinds import KINDS, kinds_of
from attnres.models.source import INDEX, SINGLE, Source, check_weights, locate, weight_files
from attnres.residuals import Residual

SHARD = "5GB"
_READ = re.compile(r"(_res_(proj|norm|bias|gate_logit|gate_proj|alpha)|\.res_(proj|norm)|depth_attn\.)")
"""In the name of every tensor of a depth read, of whatever kind."""
_WRAPPERS = ("_orig_mod.", "language_model.")  # of torch.compile; of a model that sees images too


def load_foreign(path: str | Path, kind: str | None = None) -> DepthMixin:
    """A checkpoint of another project, in evaluation mode: a model as any of ours.

    Args:
        path: a folder with config.json and safetensors, or a name on the hub.
        kind: a name in `KINDS` ("open-attnres", "fla", "kimi", "nanogpt"); None asks the config. nanoGPT writes
            pickles, which are not opened: save its state dict as model.safetensors, its `model_args` as config.json.

    Returns:
        The model. Its weights keep their dtype, the residual's are fp32; `config.foreign_config` is the config it had.

    Raises:
        UserError: not such a checkpoint, one that mixes kinds, tensors that are missing, left over or of another shape,
            or layers that no class here computes.
    """
    source = locate(path)
    chosen = _kind(source, kind)
    target = chosen.read(source.config)
    classes: Any = CLASSES[target.family]
    config_class, model_class = classes
    skipped = ("model_type", "architectures", "auto_map", "transformers_version")
    fields = {name: value for name, value in target.fields.items() if name not in skipped}
    settings = {"residual": target.residual, "residual_settings": target.settings}
    try:
        config = config_class.from_dict({**fields, **settings})
        with torch.device("meta"):
            residual = config.make_residual()
    except UserError:
        raise
    except Exception as error:  # strict configs raise many kinds
        raise UserError(
            f"config.json of {source.name} is no valid {target.family} config ({first_line(error)})"
        ) from error
    config.foreign_config = source.config
    tensors = _unwrapped(_read_tensors(source), source)
    reads = _gathered(tensors, chosen, residual, source)
    state = _renamed(tensors, chosen, config, source)
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    state.update({f"residual.{name}": tensor for name, tensor in reads.items()})
    try:
        loaded: Any = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except Exception as error:
        raise UserError(f"the weights of {source.name} do not fit its config ({first_line(error)})") from error
    model, info = loaded
    missing = {name for name in info["missing_keys"] if not name.endswith(chosen.optional)}
    for problem, names in (("lacks", missing), ("has, besides what its kind has,", info["unexpected_keys"])):
        if names:
            first, *others = sorted(chosen.theirs(name) for name in names)
            raise UserError(
                f"{source.name} {problem} '{first}' and {len(others)} other tensors: is it whole, and of kind "
                f"'{chosen.name}'?"
            )
    with torch.no_grad():
        for name in info["missing_keys"]:  # biases that this model does not have
            model.get_parameter(name).zero_()
    return model.eval()


def save_foreign(model: Any, out: str | Path, kind: str, *, beside: Sequence[Path] = ()) -> Path:
    """Write a model of ours as another project's checkpoint: its config.json, its names, safetensors.

    The tensors of the reads are written in the weights' dtype where that loses nothing, else in fp32. A model that
    `load_foreign` made comes back bit for bit.

    Args:
        out: a folder, new or empty, which is there whole or not at all.
        kind: a name in `KINDS`.
        beside: files that are copied there too, such as those of the tokenizer.

    Raises:
        UserError: an unknown kind, a model that it cannot hold (with the reason), a folder that is not empty.
    """
    out = Path(out)
    if kind not in KINDS:
        raise unknown("kind of foreign checkpoint", kind, KINDS)
    if not isinstance(model, DepthMixin):
        raise UserError(f"a {type(model).__name__} was given: expected a model of attnres")
    refuse_full(out)
    chosen, config = KINDS[kind], model.config
    stored: Config = getattr(config, "foreign_config", None) or {}
    if not chosen.says(stored):
        stored = {}
    written = {**stored, **chosen.write(config, model.residual, stored)}
    plain = {n: t for n, t in model.state_dict().items() if ".residual." not in n}
    table: Any = model.get_input_embeddings().weight
    state = _scattered(model.residual, chosen.rows(model.residual), table.dtype)
    if config.tie_word_embeddings:
        plain.pop("lm_head.weight", None)
    for name, tensor in revert_weight_conversion(model, chosen.kept(plain, written)).items():
        state[chosen.theirs(name)] = tensor.t() if name.endswith(chosen.transposed) else tensor
    prefix = "language_model." if isinstance(written.get("text_config"), dict) else ""
    state = {prefix + name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with replaced_folder(out) as folder:
        for file in beside:
            shutil.copyfile(file, folder / file.name)
        write_json(folder / "config.json", written)
        _write(folder, state)
    return out


def _kind(source: Source, name: str | None) -> Kind:
    if name is not None:
        if name not in KINDS:
            raise unknown("kind of foreign checkpoint", name, KINDS)
        if not KINDS[name].says(source.config):
            raise UserError(f"config.json of {source.name} is not that of a '{name}' checkpoint: leave kind out")
        return KINDS[name]
    if str(source.config.get("model_type", "")).startswith("attnres_"):
        raise UserError(f"{source.name} is a model of attnres already: load it with attnres.models.load")
    found = kinds_of(source.config)
    if not found:
        raise UserError(
            f"config.json of {source.name} has no depth reads of a known kind ({', '.join(KINDS)}): a plain model is "
            "converted with `attnres convert`"
        )
    if len(found) > 1:
        kinds = " and ".join(f"'{kind.name}'" for kind in found)
        raise UserError(f"config.json of {source.name} has fields of {kinds}: say which it is with kind")
    return found[0]


def _read_tensors(source: Source) -> dict[str, Tensor]:
    files = weight_files(source)
    check_weights(source, files)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            tensors.update({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
    return tensors


def _unwrapped(tensors: dict[str, Tensor], source: Source) -> dict[str, Tensor]:
    """Without what stands in front of every name."""
    for wrapper in _WRAPPERS:
        wrapped = [name for name in tensors if name.startswith(wrapper)]
        if wrapped and len(wrapped) < len(tensors):
            other = next(name for name in tensors if not name.startswith(wrapper))
            raise UserError(f"{source.name} has '{wrapped[0]}' and '{other}': only a decoder of text is loaded")
        if wrapped:
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors


def _gathered(tensors: dict[str, Tensor], kind: Kind, residual: Residual, source: Source) -> dict[str, Tensor]:
    """The residual's tensors, by their names in it; what they are made of is taken out of `tensors`."""
    rows = kind.rows(residual)
    missing = [row.theirs for row in rows if row.theirs not in tensors]
    others = [name for name in tensors if _READ.search(name) and name not in {row.theirs for row in rows}]
    if missing and others:
        raise UserError(
            f"{source.name} has depth reads named '{others[0]}' where '{kind.name}' names '{missing[0]}': its config "
            "and its weights are of two kinds"
        )
    if missing:
        raise UserError(f"{source.name} lacks '{missing[0]}' and {len(missing) - 1} other tensors of depth reads")
    if others:
        raise UserError(
            f"{source.name} has '{others[0]}' and {len(others) - 1} other tensors of depth reads for which its config "
            f"('{kind.name}') has no place"
        )
    made = {n: torch.empty(t.shape, dtype=_wide(tensors)) for n, t in residual.state_dict().items()}
    for row in rows:
        tensor, place = tensors.pop(row.theirs), made[row.ours][row.index]
        if tensor.numel() != place.numel() or tensor.squeeze().shape != place.squeeze().shape:
            raise UserError(
                f"'{row.theirs}' of {source.name} has shape {tuple(tensor.shape)}: expected {row.shape}, as its config "
                "says"
            )
        place.copy_(tensor.reshape(place.shape))
    return made


def _wide(tensors: dict[str, Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype is torch.float64 for t in tensors.values()) else torch.float32


def _renamed(tensors: dict[str, Tensor], kind: Kind, config: Any, source: Source) -> dict[str, Tensor]:
    """All other tensors under our names."""
    state = {}
    for name, tensor in tensors.items():
        if name.endswith(kind.ignored):
            continue
        new = kind.ours(name)
        if new in state:
            raise UserError(f"{source.name} has '{new}' under two names: its weights are of two kinds")
        state[new] = tensor.t().contiguous() if new.endswith(kind.transposed) else tensor
    if config.tie_word_embeddings and "lm_head.weight" in state:
        head = state.pop("lm_head.weight")
        if not torch.equal(state.setdefault(kind.table, head), head):
            raise UserError(f"{source.name} ties its head to its embedding, and holds two that differ")
    return state


def _scattered(residual: Residual, rows: list[Row], dtype: torch.dtype) -> dict[str, Tensor]:
    """The residual's tensors under their names; a bias that ours does not have is zero."""
    ours, found = residual.state_dict(), {}
    for row in rows:
        if row.ours in ours:
            tensor = ours[row.ours][row.index].reshape(row.shape)
        else:
            tensor = torch.zeros(row.shape)
        exact = torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
        found[row.theirs] = tensor.to(dtype) if exact else tensor.clone()
    return found


def _write(folder: Path, state: dict[str, Tensor]) -> None:
    """Safetensors, in several files where they are large."""
    split = split_torch_state_dict_into_shards(state, max_shard_size=SHARD)
    for file, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    else:
        assert list(split.filename_to_tensors) == [SINGLE]
