"""What the campaign damages: a corpus, prepared data, a run with its model and inspection, a plain model, a comparison
and studies; all tiny."""

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import attnres
from fuzz.forked import forked

SIZE = (
    "{family: qwen3, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "head_dim: 8, intermediate_size: 32}"
)
STEPS = 12
CONFIGURATIONS = {
    "config.yaml": "steps: 2\noptim: {lr: 1e-3, betas: [0.9, 0.95]}\nmodel: {residual: full, settings: {}}\n",
    "comparison.yaml": "steps: 2\nvariants: [standard, block:num_blocks=2]\nseeds: [0, 1]\njobs: 2\n",
    "config.toml": 'steps = 2\n[optim]\nlr = 1e-3\nbetas = [0.9, 0.95]\n[model]\nresidual = "full"\nsettings = {}\n',
    "config.json": '{"steps": 2, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "model": {"residual": "full"}}',
}
SPEED = {"key": {}, "device": "cpu", "variants": {"full": {"median_s": 0.1, "ratio": 1.0, "times": [0.1, 0.1]}}}
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
    def indexed(self) -> Path:
        """The plain model, its weights in two files and an index."""
        return self.root / "indexed"

    @property
    def comparison(self) -> Path:
        return self.root / "comparison"

    @property
    def studies(self) -> Path:
        return self.root / "studies"

    @property
    def task(self) -> Path:
        return self.root / "task.jsonl"

    def train(self, out: Path, *more: str) -> list[str]:
        """A command line that trains a tiny model."""
        flags = [*SHORT, "--source", str(self.tokens), "--size", SIZE, "--residual", "block", "--num-blocks", "2"]
        flags += ["--seq-len", "16", "--batch-size", "2", "--val-windows", "4", "--steps", str(STEPS), "--lr", "0.01"]
        flags += ["--val-every", "4", "--log-every", "2", "--depth-every", "4", "--save-every", "3"]
        return ["train", *flags, "--out", str(out), *more]

    def compare(self, out: Path) -> list[str]:
        """A command line that compares two of them."""
        flags = [*SHORT[1:], "--variants", "standard", "full", "--source", str(self.tokens), "--size", SIZE]
        flags += ["--seq-len", "16", "--batch-size", "2", "--val-windows", "4", "--steps", str(STEPS), "--val-every"]
        return ["compare", *flags, "4", "--save-every", "3", "--timing-s", "0", "--jobs", "2", "--out", str(out)]

    def study(self, out: Path) -> list[str]:
        """A command line that carries out a study whose runs are one function call each."""
        return ["study", "growth", "--preset", "seconds", "--seeds", "1", "--jobs", "2", "--out", str(out)]


def damageable(material: Material) -> list[Path]:
    """The folders that no command may change."""
    return [
        *(material.corpus, material.tokens, material.run, material.plain),
        *(material.indexed, material.comparison, material.studies),
    ]


def make(root: Path, *, whole: bool = True) -> Material:
    """Make it, once for the code as it is; raises AssertionError where a command fails. Without `whole` it has no
    comparison and no study."""
    material, made_by = Material(root), root / "code.txt"
    if not made_by.is_file() or made_by.read_text() != _code():
        shutil.rmtree(root, ignore_errors=True)
        _make(material)
        made_by.write_text(_code())
    if whole and not material.studies.exists():
        _do(material.compare(material.comparison))
        (material.comparison / "speed.json").write_text(json.dumps(SPEED))
        _do(material.study(material.studies))
        noise = {"source": None, "values": {"by_steps": {"40": {"sigma": 0.01, "degrees": 3}}}}
        (material.studies / "seconds" / "noise").mkdir()
        (material.studies / "seconds" / "noise" / "result.json").write_text(json.dumps(noise))
    return material


def _code() -> str:
    """A hash of the package, the laboratory and the campaign: other code may train another run."""
    parts = (Path(attnres.__file__).parent, Path(__file__).parents[1] / "lab", Path(__file__).parent)
    files = sorted(file for part in parts for file in part.rglob("*") if file.suffix in (".py", ".c"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _make(material: Material) -> None:
    material.corpus.mkdir(parents=True)
    draw = random.Random(0)
    words = "stream read write source block depth query norm head layer".split()
    texts = [" ".join(draw.choices(words, k=60)) for _ in range(60)]
    for number, text in enumerate(texts):
        (material.corpus / f"{number}.txt").write_text(text)
    source = ["--source", str(material.corpus), "--tokenizer", "bpe:280", "--held-out", "0.2"]
    _do(["prepare", *source, "--out", str(material.tokens)])
    _do(material.train(material.run))
    _plain(material.run / "model", material.plain, "1GB")
    _plain(material.run / "model", material.indexed, "8KB")
    assert (material.indexed / "model.safetensors.index.json").is_file()
    (material.root / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, text in CONFIGURATIONS.items():
        (material.root / name).write_text(text)
    question = {"query": "stream read", "choices": ["write", "norm"], "gold": 0}
    material.task.write_text("".join(json.dumps(question) + "\n" for _ in range(3)))


def _do(words: list[str]) -> None:
    outcome = forked(words, seconds=200)
    assert outcome.code == 0, f"{words}: {outcome.said}"


def _plain(ours: Path, out: Path, most: str) -> None:
    """A plain model with the tokenizer of a trained one, its weights in files of at most so much."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = json.loads((ours / "config.json").read_text())
    strange = ("residual", "model_type", "architectures", "auto_map", "dtype")
    torch.manual_seed(0)
    config = Qwen3Config(**{name: value for name, value in fields.items() if not name.startswith(strange)})
    Qwen3ForCausalLM(config).save_pretrained(out, max_shard_size=most)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ours / name, out / name)
