"""A model with depth reads as a graph of plain operators, for runtimes that know nothing of this package."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError, foreign
from attnres.files import copy_files, replaced_folder
from attnres.folders import refuse_other
from attnres.forward import evaluating
from attnres.models.exactness import BOUNDS, fixed_tokens
from attnres.models.open import open_checkpoint

_TOKENS = 8


class _Logits(nn.Module):
    """ids (B, T) and their mask -> logits (B, T, V), without a cache."""

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
        out: a folder, new or empty, which is there whole or not at all: `model.onnx`, or `model.pt2` for
            `torch.export.load`, with the tokenizer.
        onnx: write ONNX (extra `export`), and compare what onnxruntime computes; else what torch.export gives.
        trust_remote_code: run code that comes with the model.

    Returns:
        What was written, and how far its logits are from the model's.

    Raises:
        UserError: no such model, a folder that is not empty, a model that cannot be exported or whose graph computes
            something else.
    """
    out = refuse_other(out)
    if onnx and any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError("ONNX needs the packages onnx, onnxscript and onnxruntime: pip install 'attnres[export]'")
    checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
    loaded = checkpoint.load("fp32")
    if loaded.get_output_embeddings() is None:
        raise UserError(f"{model} is a {type(loaded).__name__}: a model with a language-model head is expected")
    ids = fixed_tokens(loaded, _TOKENS)
    mask = torch.ones_like(ids)
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with evaluating(loaded), torch.no_grad(), replaced_folder(out) as folder:
        wrapped = _Logits(loaded)
        what = f"torch.export makes no graph of {model}, a {type(loaded).__name__}, for any number of tokens"
        with foreign(what, "use the model as it is"):
            program = torch.export.export(wrapped, (ids, mask), dynamic_shapes=(dict(sizes), dict(sizes)))
        run = _write_onnx(program, folder) if onnx else _write_program(program, folder)
        longer = torch.cat([ids, ids.flip(1)[:, :3]], 1)[:1]  # of other sizes than those it was traced with
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
