"""What the campaign damages: a corpus, prepared data, a run with its model and inspection, a plain model; all tiny."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from fuzz.forked import forked

SIZE = (
    "{family: qwen3, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "head_dim: 8, intermediate_size: 32}"
)
STEPS = 12
SHORT = ["--no-progress", "--device", "cpu", "--dtype", "fp32"]


@dataclass(frozen=True)
class Material:
    """Folders and files by what they are; `root` holds them all and the cache."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def tokens(self) -> Path:
        return self.root / "tokens"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def plain(self) -> Path:
        return self.root / "plain"

    @property
    def task(self) -> Path:
        return self.root / "task.jsonl"

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    def train(self, out: Path, *more: str) -> list[str]:
        """A command line that trains a tiny model."""
        flags = [*SHORT, "--source", str(self.tokens), "--size", SIZE, "--residual", "block", "--num-blocks", "2"]
        flags += ["--seq-len", "16", "--batch-size", "2", "--val-windows", "4", "--steps", str(STEPS), "--lr", "0.01"]
        flags += ["--val-every", "4", "--log-every", "2", "--depth-every", "4", "--save-every", "3"]
        return ["train", *flags, "--out", str(out), *more]


def make(root: Path) -> Material:
    """Make it all, once; raises AssertionError where a command fails."""
    material = Material(root)
    if material.config.exists():
        return material
    shutil.rmtree(root, ignore_errors=True)
    material.corpus.mkdir(parents=True)
    draw = random.Random(0)
    words = "stream read write source block depth query norm head layer".split()
    for number in range(60):
        (material.corpus / f"{number}.txt").write_text(" ".join(draw.choices(words, k=60)))
    source = ["--source", str(material.corpus), "--tokenizer", "bpe:280", "--held-out", "0.2"]
    _do(["prepare", *source, "--out", str(material.tokens)])
    _do(material.train(material.run))
    _plain(material.run / "model", material.plain)
    question = {"query": "stream read", "choices": ["write", "norm"], "gold": 0}
    material.task.write_text("".join(json.dumps(question) + "\n" for _ in range(3)))
    material.config.write_text(
        "steps: 2\noptim: {lr: 1e-3, betas: [0.9, 0.95]}\nmodel: {residual: full, settings: {}}\n"
    )
    return material


def _do(words: list[str]) -> None:
    outcome = forked(words)
    assert outcome.code == 0, f"{words}: {outcome.said}"


def _plain(ours: Path, out: Path) -> None:
    """A plain model with the tokenizer of a trained one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = json.loads((ours / "config.json").read_text())
    strange = ("residual", "model_type", "architectures", "auto_map", "dtype")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in fields.items() if not k.startswith(strange)})).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ours / name, out / name)
