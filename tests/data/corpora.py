"""Documents made up for tests."""

import json
from pathlib import Path

from words import sentence


def document(seed: int, words: int = 60) -> str:
    """Some sentences, another for every seed."""
    return sentence(seed, words) + f" number {seed}."


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path
