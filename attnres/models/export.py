"""Write a model with depth reads into a folder: in this package's layout, in another project's, or as a graph of plain
operators for other runtimes."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from attnres.errors import UserError, foreign, install, unknown
from attnres.files import copy_files, replaced_folder, write_json, write_text
from attnres.folders import refuse_other
from attnres.head import evaluating
from attnres.models.bases import DepthMixin
from attnres.models.config import model_card
from attnres.models.exactness import BOUNDS, compare_logits, fixed_tokens
from attnres.models.foreign import WRITTEN, formats_of
from attnres.models.foreign.format import WrittenFormat, cannot
from attnres.models.foreign.weights import foreign_state
from attnres.models.model_files import INDEX
from attnres.models.open import open_checkpoint
from attnres.progress import quiet_transformers
from attnres.text import with_settings

SHARD = "5GB"
"""Largest file of weights."""


def export_model(
    model: DepthMixin | str | Path, out: str | Path, to: str | None = None, *, trust_remote_code: bool = False
) -> str:
    """Write a model with depth reads, its weights bit for bit, with its tokenizer and generation settings.

    >>> print(export_model("wdlctc/open-attnres-block", "models/cumulative"))     # doctest: +SKIP
    >>> print(export_model("runs/mine", "exported", to="fla"))                    # doctest: +SKIP

    Args:
        model: in memory; or a run folder, a model folder or a hub name, of attnres or of another project.
        out: a folder, new or empty; it is written whole or not at all.
        to: a name in `foreign.WRITTEN` ("open-attnres", "fla", "kimi"), a project that then loads the folder; None is
            this package's layout.
        trust_remote_code: run code that comes with the model.

    Returns:
        A description of what was written, in a few lines.

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
        formats = [kind.name for kind in formats_of(checkpoint.fields)]
        name, extra_files = " ".join([str(model), *(f"({format})" for format in formats)]), checkpoint.files_beside()
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
    """Write a folder in this package's layout, whole or not at all, with copies of `extra_files` (by name) and a model
    card.

    Args:
        report: the content of conversion.json, if given. source: the model that this one was made from.

    Raises:
        UserError: the written model, loaded again, computes something else than `model`.
    """
    # copied, because Transformers refuses to write some settings that it reads
    if "generation_config.json" in extra_files:
        model.generation_config = GenerationConfig()
    with replaced_folder(out) as folder, quiet_transformers():
        model.save_without_card(folder, max_shard_size=SHARD)
        _check_written(model, folder)
        copy_files(extra_files, folder)
        write_text(folder / "README.md", model_card(model, source, report, reloaded=True))
        if report is not None:
            write_json(folder / "conversion.json", report)


def _check_written(model: Any, folder: Path) -> None:
    """Load the written model and compare its outputs."""
    loaded, info = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    # In fp32, whatever the weights' dtype: in 16 bits one more rounding already exceeds the bound.
    difference = compare_logits(model, loaded.to(model.device), torch.float32)
    if info["missing_keys"] or not difference.within:
        missing = f", and lacks {', '.join(sorted(info['missing_keys']))}" if info["missing_keys"] else ""
        raise UserError(
            f"{type(model).__name__} computes something else when it is loaded again (outputs differ by "
            f"{difference.largest:.2g}{missing}): nothing was written; please report it with the name of the model"
        )


def _write_foreign(model: DepthMixin, out: Path, kind: WrittenFormat, extra_files: Mapping[str, Path]) -> None:
    stored: dict[str, Any] = getattr(model.config, "foreign_config", None) or {}
    stored = stored if kind.matches(stored) else {}
    if model.residual.value_kind != "none":
        raise cannot(kind, f"its residual has the setting value_residual={model.residual.value_kind}")
    config = {**stored, **kind.write(model.config, model.residual, stored)}
    state = foreign_state(model, kind)
    with replaced_folder(out) as folder:
        copy_files(extra_files, folder)
        write_json(folder / "config.json", config)
        # Experts are parts of one tensor: only what a file holds is copied.
        split = split_state_dict_into_shards_factory(
            state,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=SHARD,
        )
        for file, names in split.filename_to_tensors.items():
            parts = {name: state[name].cpu().clone(memory_format=torch.contiguous_format) for name in names}
            save_file(parts, folder / file, metadata={"format": "pt"})
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


class _Logits(nn.Module):
    """Maps ids (B, T) and their mask to logits (B, T, V), without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def export_graph(model: str | Path, out: str | Path, *, onnx: bool = False, trust_remote_code: bool = False) -> str:
    """Write a language model as a graph that computes logits of any number of rows and tokens.

    >>> print(export_graph("runs/mine", "exported", onnx=True))      # doctest: +SKIP

    Args:
        model: a run folder, a model folder or a hub name.
        out: a folder, new or empty, written whole or not at all: `model.onnx`, or `model.pt2` for `torch.export.load`,
            with the tokenizer.
        onnx: write ONNX (extra `export`) and compare it in onnxruntime; else write a graph of torch.export.
        trust_remote_code: run code that comes with the model.

    Returns:
        A description of what was written, and the largest difference of its logits from the model's.

    Raises:
        UserError: no such model, a folder that is not empty, a model that cannot be exported, or a graph whose logits
            differ.
    """
    out = refuse_other(out)
    if onnx and any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError(f"ONNX needs the packages onnx, onnxscript and onnxruntime: {install('export')}")
    checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
    loaded = checkpoint.load("fp32")
    if loaded.get_output_embeddings() is None:
        raise UserError(f"{model} is a {type(loaded).__name__}: a model with a language-model head is expected")
    ids = fixed_tokens(loaded, 8)
    mask = torch.ones_like(ids)
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with evaluating(loaded), torch.no_grad(), replaced_folder(out) as folder:
        wrapped = _Logits(loaded)
        what = f"torch.export makes no graph of {model}, a {type(loaded).__name__}, for any number of tokens"
        with foreign(what, "use the model as it is"):
            program = torch.export.export(wrapped, (ids, mask), dynamic_shapes=(dict(sizes), dict(sizes)))
        run = _write_onnx(program, folder) if onnx else _write_program(program, folder)
        longer = torch.cat([ids, ids.flip(1)[:, :3]], 1)[:1]  # of other sizes than the traced ones
        expected = wrapped(longer, torch.ones_like(longer))
        largest = (run(longer, torch.ones_like(longer)) - expected).abs().max().item() / expected.abs().max().item()
        if not largest <= BOUNDS[torch.float32]:
            raise UserError(f"the graph of {model} computes other logits than the model ({largest:.1e} of the largest)")
        copy_files(checkpoint.files_beside(), folder)
    name = "model.onnx" if onnx else "model.pt2"
    return f"{model} -> {Path(out) / name}\n  logits      differ by at most {largest:.1e} of the largest"


def _write_program(program: Any, folder: Path) -> Any:
    torch.export.save(program, folder / "model.pt2")
    return torch.export.load(folder / "model.pt2").module()


def _write_onnx(program: Any, folder: Path) -> Any:
    onnxruntime = importlib.import_module("onnxruntime")

    path = folder / "model.onnx"
    exported: Any = torch.onnx.export(
        program, input_names=["input_ids", "attention_mask"], output_names=["logits"], verbose=False
    )
    exported.save(path, external_data=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        return torch.from_numpy(logits)

    return run
