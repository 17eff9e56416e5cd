"""Folders of other projects' models as folders of ours, and ours as theirs: the weights and what lies beside them."""

import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from attnres.errors import UserError, unknown
from attnres.files import read_json, refuse_full, replaced_folder
from attnres.models.build import load
from attnres.models.classes import DepthMixin
from attnres.models.foreign import SHARD, load_foreign, save_foreign
from attnres.models.foreign_kinds import KINDS, kinds_of
from attnres.models.source import Source, locate


def import_foreign(source: str | Path, out: str | Path, kind: str | None = None) -> str:
    """Write another project's checkpoint as a model of ours: weights bit for bit, tokenizer and generation settings.

    Args:
        source: a folder or a name on the hub. kind: see `load_foreign`.
        out: a folder, new or empty, which is there whole or not at all.

    Returns:
        What was done, in a few lines.

    Raises:
        UserError: see `load_foreign`; a folder that is not empty.
    """
    refuse_full(out)
    found = locate(source)
    model = load_foreign(source, kind)
    named = kind or kinds_of(found.config)[0].name
    with replaced_folder(out) as beside:
        kept = {file.name: file for file in found.kept_files()}
        if "generation_config.json" in kept:  # copied as it is; Transformers refuses to write some that it reads
            model.generation_config = GenerationConfig()
        model.save_pretrained(beside, max_shard_size=SHARD)
        for name, file in kept.items():
            shutil.copyfile(file, beside / name)
    return _said(f"{source} ({named}) -> {out}", model)


def export_foreign(source: str | Path, out: str | Path, kind: str) -> str:
    """Write a model of ours as another project's checkpoint, with its tokenizer and generation settings.

    Args:
        source: a model folder, or the folder of a finished run.
        out: a folder, new or empty, which is there whole or not at all. kind: a name in `KINDS`.

    Returns:
        What was done, in a few lines.

    Raises:
        UserError: no model of ours; see `save_foreign`.
    """
    if kind not in KINDS:
        raise unknown("kind of foreign checkpoint", kind, KINDS)
    refuse_full(out)
    folder = Path(source).expanduser()
    if (folder / "model" / "config.json").is_file():  # a run folder
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        raise UserError(f"{source} holds no model: expected a folder of a model or of a finished run")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not str(config.get("model_type", "")).startswith("attnres_"):
        raise UserError(f"{source} is no model of attnres, which --to writes: convert it first, without --to")
    model: Any = load(folder, dtype="auto")
    kept = tuple(Source(str(source), folder, config, trusted=False).kept_files())
    save_foreign(model, out, kind, beside=kept)
    return _said(f"{source} -> {out} ({kind})", model)


def _said(line: str, model: DepthMixin) -> str:
    config: Any = model.config
    settings = ", ".join(f"{name}={value}" for name, value in config.residual_settings.items())
    own = sum(parameter.numel() for parameter in model.residual.parameters())
    rest = model.num_parameters() - own
    dtype = str(model.dtype).removeprefix("torch.")
    return "\n".join(
        [
            line,
            f"  family      {type(model).plain_class.__name__}, {model.residual.num_sublayers} sublayers of width "
            f"{model.residual.width}",
            f"  residual    {config.residual}{f' ({settings})' if settings else ''}",
            f"  parameters  {rest:,} {dtype} + {own:,} of the residual",
        ]
    )
