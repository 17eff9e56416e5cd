"""Writes a model with depth reads into a folder: in our own layout, or in another project's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import GenerationConfig

from attnres.errors import UserError, unknown
from attnres.files import copy_files, replaced_folder, write_json, write_text
from attnres.folders import refuse_other
from attnres.models.bases import DepthMixin
from attnres.models.card import model_card
from attnres.models.exactness import compare_logits
from attnres.models.foreign import WRITTEN, formats_of
from attnres.models.foreign.format import WrittenFormat, cannot
from attnres.models.foreign.weights import foreign_state
from attnres.models.open import open_checkpoint
from attnres.models.weight_files import INDEX
from attnres.progress import quiet_transformers
from attnres.text import with_settings

SHARD = "5GB"
"""Largest file of weights; they are written from where they lie, so its size costs no memory."""


def export_model(
    model: DepthMixin | str | Path, out: str | Path, to: str | None = None, *, trust_remote_code: bool = False
) -> str:
    """Write a model with depth reads as it is, weights bit for bit, with its tokenizer and generation settings.

    >>> print(export_model("wdlctc/open-attnres-block", "models/cumulative"))     # doctest: +SKIP
    >>> print(export_model("runs/mine", "exported", to="fla"))                    # doctest: +SKIP

    Args:
        model: in memory; or a run folder, a model folder or a hub name, of attnres or of another project.
        out: a folder, new or empty, which is there whole or not at all.
        to: a name in `foreign.WRITTEN` ("open-attnres", "fla"), whose projects load the folder; None is our layout.
        trust_remote_code: run code that comes with the model.

    Returns:
        What was written, in a few lines.

    Raises:
        UserError: a model without depth reads, an unknown format or one that cannot hold the model (with the reason),
            a folder that is not empty.
    """
    if to is not None and to not in WRITTEN:
        raise unknown("format to write", to, WRITTEN)
    out = refuse_other(out)
    name, extra_files = type(model).__name__, dict[str, Path]()
    if isinstance(model, str | Path):
        checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
        if checkpoint.kind == "plain":
            raise UserError(f"{model} is a plain model, which has no depth reads to write: give it some with convert")
        theirs = [kind.name for kind in formats_of(checkpoint.fields)]
        name, extra_files = " ".join([str(model), *(f"({format})" for format in theirs)]), checkpoint.files_beside()
        model = cast(DepthMixin, checkpoint.load())
    if not isinstance(model, DepthMixin):
        raise UserError(f"a {name} was given: expected a model of attnres")
    if to is None:
        write_model(model, out, extra_files, source=name)
    else:
        _write_foreign(model, Path(out), WRITTEN[to], extra_files)
    return "\n".join([f"{name} -> {out}{f' ({to})' if to else ''}", *_description(model)])


def write_model(
    model: Any, out: str | Path, extra_files: Mapping[str, Path], report: Any = None, source: str | None = None
) -> None:
    """Write a folder in our layout, whole or not at all, with copies of `extra_files` (by name) and a model card.

    Args:
        report: what conversion.json will hold, where it is given. source: the model that it was made from.

    Raises:
        UserError: what was written is another function than `model` when it is loaded.
    """
    if "generation_config.json" in extra_files:  # copied as it is; Transformers refuses to write some that it reads
        model.generation_config = GenerationConfig()
    with replaced_folder(out) as folder, quiet_transformers():
        model.save_without_card(folder, max_shard_size=SHARD)
        _check_written(model, folder)
        copy_files(extra_files, folder)
        write_text(folder / "README.md", model_card(model, source, report, reloaded=True))
        if report is not None:
            write_json(folder / "conversion.json", report)


def _check_written(model: Any, folder: Path) -> None:
    """Load what was written and compare what it computes."""
    loaded, info = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    # In fp32, whatever the weights' dtype: in 16 bits one rounding more is already larger than the bound.
    difference = compare_logits(model, loaded.to(model.device), torch.float32)
    if info["missing_keys"] or not difference.within:
        missing = f", and lacks {', '.join(sorted(info['missing_keys']))}" if info["missing_keys"] else ""
        raise UserError(
            f"{type(model).__name__} computes something else when it is loaded again (outputs differ by "
            f"{difference.largest:.2g}{missing}): nothing was written; please report it with the name of the model"
        )


def _write_foreign(model: DepthMixin, out: Path, kind: WrittenFormat, extra_files: Mapping[str, Path]) -> None:
    stored: dict[str, Any] = getattr(model.config, "foreign_config", None) or {}
    stored = stored if kind.says(stored) else {}
    if model.residual.value_kind != "none":
        raise cannot(kind, f"its residual has the setting value_residual={model.residual.value_kind}")
    config = {**stored, **kind.write(model.config, model.residual, stored)}
    state = foreign_state(model, kind)
    with replaced_folder(out) as folder:
        copy_files(extra_files, folder)
        write_json(folder / "config.json", config)
        split = split_torch_state_dict_into_shards(state, max_shard_size=SHARD)
        for file, names in split.filename_to_tensors.items():
            save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
        if split.is_sharded:
            write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _description(model: DepthMixin) -> list[str]:
    config: Any = model.config
    residual = sum(parameter.numel() for parameter in model.residual.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        f"  family      {type(model).plain_class.__name__}, {model.residual.num_sublayers} sublayers of width "
        f"{model.residual.width}",
        f"  residual    {with_settings(config.residual, config.residual_settings)}",
        f"  parameters  {model.num_parameters() - residual:,} {dtype} + {residual:,} of the residual",
    ]
