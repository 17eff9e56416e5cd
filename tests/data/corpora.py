"""Documents made up for tests."""

import json
import random
from pathlib import Path

PANGRAM = "the quick brown fox jumps over a lazy dog while seven wizards box up jugs of liquid zinc"
WORDS = PANGRAM.split(" ")


def document(seed: int, words: int = 60) -> str:
    """Some sentences, another for every seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)) + f" number {seed}."


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path
