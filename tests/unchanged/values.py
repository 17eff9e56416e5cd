"""What a change of structure must not move, as recorded at a commit: training steps, files, names, flags.

`PYTHONPATH=.:tests python tests/unchanged/values.py FILE` writes today's values with every digit. Written before and
after a move on one machine, the two files have to be equal; `test_unchanged.py` compares with the committed ones, to
what another processor may round differently.
"""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from launch import torchrun

import attnres
from attnres.cli import COMMANDS, main
from attnres.models import build
from attnres.residuals import registry

HERE = Path(__file__).parent
SIZE: dict[str, Any] = {
    "family": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "tie_word_embeddings": True,
}
WORDS, STEPS = 24, 10
PACKAGES = ["", ".ops", ".residuals", ".models", ".inspect", ".data", ".evals", ".figures", ".report", ".training"]
"""Subpackages whose exported names users import."""


def mechanisms() -> list[str]:
    """Return the names of the mechanisms that ship."""
    return sorted(registry.RESIDUALS)


def ids() -> torch.Tensor:
    """Return the tokens that every model here reads, (2, 6)."""
    return torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(1))


def ten_steps(residual: str, dtype: torch.dtype) -> list[list[float]]:
    """Train a tiny model for ten AdamW steps; return [loss, gradient norm] of each."""
    model = build(SIZE, residual, vocab_size=WORDS, max_positions=16, seed=0).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = []
    for step in range(STEPS):
        model.residual.set_progress(step / STEPS)
        # Transformers takes the loss of any model in fp32, which processors round differently.
        logits = model(input_ids=ids(), use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids()[:, 1:].flatten())
        penalty = model.residual.penalty()
        loss = loss if penalty is None else loss + penalty
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append([loss.item(), norm.item()])
    return rows


def logits(folder: Path) -> list[float]:
    """Return the logits of a saved model for `ids`, in fp64, flat."""
    model = attnres.load(str(folder)).double().eval()
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False).logits.flatten().tolist()


def save(residual: str, folder: Path) -> None:
    """Save a tiny model whose residual has left its start values."""
    model = build(SIZE, residual, vocab_size=WORDS, max_positions=16, seed=3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    for file in folder.iterdir():  # what else a folder has says nothing about the model
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


def layouts(folder: Path) -> dict[str, list[list[float]]]:
    """Train Block for ten fp32 steps in each layout of two processes; return [loss, gradient norm] of each step."""
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and then the dog ran over it. " * 400)
    options = {"source": text, "tokenizer": "bpe:270", "steps": STEPS, "seq-len": 16, "batch-size": 4, "val-windows": 4}
    rest = {
        "dtype": "fp32",
        "log-every": 1,
        "size": json.dumps({**SIZE, "num_key_value_heads": 2}),
        "residual": "block",
    }
    found = {}
    for layout in ([], ["--shard", 2], ["--pp", 2], ["--tp", 2], ["--cp", 2]):
        out = folder / "-".join(["run", *map(str, layout)])
        words = [word for name, value in {**options, **rest, "out": out}.items() for word in (f"--{name}", value)]
        command = ["-m", "attnres", "train", *words, "--no-progress", *layout]
        start = torchrun(2, *map(str, command)) if layout else [sys.executable, *map(str, command)]
        subprocess.run(start, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found[" ".join(map(str, layout))] = [[r["loss"], r["grad_norm"]] for r in rows if r["kind"] == "train"]
    return found


def names() -> dict[str, list[str]]:
    """Return the names that each public package exports."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module("attnres" + package)
        found["attnres" + package] = sorted(getattr(module, "__all__", []))
    return found


def flags() -> dict[str, list[str]]:
    """Return the flags in each command's help."""
    found = {}
    for command in COMMANDS:
        printed = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
            main([command, "--help"])
        found[command] = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", printed.getvalue())))
    return found


def values() -> dict[str, Any]:
    """Return everything that must not move."""
    return {
        "steps fp64": {name: ten_steps(name, torch.float64) for name in mechanisms()},
        "steps fp32": {name: ten_steps(name, torch.float32) for name in mechanisms()},
        "logits": {name: logits(HERE / "models" / name) for name in mechanisms()},
        "names": names(),
        "flags": flags(),
    }


if __name__ == "__main__":
    for name in mechanisms():
        if not (HERE / "models" / name).exists():
            save(name, HERE / "models" / name)
    with tempfile.TemporaryDirectory() as scratch:
        everything = {**values(), "layouts": layouts(Path(scratch))}
    Path(sys.argv[1]).write_text(json.dumps(everything, indent=0))
