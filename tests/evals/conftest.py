"""Small random models with a tokenizer of their own, saved as users have them, and task files in the real formats."""

import json
import random
from pathlib import Path

import pytest
import torch
from tiny import SIZE
from transformers import PreTrainedTokenizerFast

from attnres.data.tokenizer import END_OF_TEXT, train_tokenizer
from attnres.models import build

PANGRAM = "the quick brown fox jumps over a lazy dog while seven wizards box up jugs of liquid zinc"
WORDS = PANGRAM.split(" ")
CONTEXT = 64


def sentence(seed, words=12):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_tokenizer(folder, vocabulary=320, **options):
    backend, _ = train_tokenizer(vocabulary, [sentence(i, 60) for i in range(50)])
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, **options}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder, residual="block", seed=0, vocabulary=320, plain=False):
    """A model whose logits are far apart and whose depth reads are not uniform."""
    tokenizer = write_tokenizer(folder, vocabulary)
    settings = {"block_size": 2} if residual == "block" else {}
    model = build(SIZE, residual, vocab_size=len(tokenizer), max_positions=CONTEXT, seed=seed, settings=settings)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # The residual's last, so that the other weights are the same whatever it has.
        for name, parameter in sorted(model.named_parameters(), key=lambda pair: "residual" in pair[0]):
            scale = 0.5 if "residual" in name else 0.2
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    if plain:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        fields = {k: v for k, v in model.config.to_dict().items() if not k.startswith("residual") and k != "model_type"}
        twin = Qwen3ForCausalLM(Qwen3Config(**fields))
        twin.load_state_dict(model.state_dict(), strict=False)
        model = twin
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_tokenizer():
    """Writes a tokenizer of some vocabulary into a folder."""
    return write_tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of models: two with depth reads, a plain one, and one with another tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return {
        "block": save_model(root / "block"),
        "full": save_model(root / "full", "full", seed=1),
        "plain": save_model(root / "plain", "standard", seed=2, plain=True),
        "standard": save_model(root / "standard", "standard", seed=2),
        "other": save_model(root / "other", seed=3, vocabulary=300),
    }


def write_jsonl(path: Path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with every built-in task, in the formats of the real files."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def choices(n):
        return [sentence(rng.random(), rng.randint(1, 6)) for _ in range(n)]

    for name, query, n in (
        ("hellaswag_val", "{}", 4),
        ("arc_easy", "Question: {}?", 4),
        ("arc_challenge", "Question: {}?", 4),
        ("piqa", "Question: {}?\n", 2),
        ("boolq", "Passage: {}.\nQuestion: is it so?", 2),
    ):
        rows = [
            {
                "query": query.format(sentence(i)),
                "choices": ["no", "yes"] if name == "boolq" else choices(n),
                "gold": rng.randrange(n),
            }
            for i in range(9)
        ]
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_jsonl(
        folder / "winogrande.jsonl",
        [
            {"context_options": [sentence(i), sentence(i + 50)], "continuation": sentence(i + 99, 4), "gold": i % 2}
            for i in range(7)
        ],
    )
    words = [{"context": sentence(i, 20), "continuation": rng.choice(WORDS)} for i in range(11)]
    write_jsonl(folder / "lambada_openai.jsonl", words)
    lines = [" ", " = Title = ", " "] + [f" {sentence(i, 30)} . " for i in range(12)]
    (folder / "wikitext2_test.raw").write_text("\n".join(lines), "utf-8")
    return folder
