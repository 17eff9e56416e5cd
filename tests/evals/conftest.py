"""Task files in the real formats."""

import json
import random
from pathlib import Path

import pytest
from words import WORDS, sentence


def write_jsonl(path: Path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Every built-in task in the formats of the real files, and a file in each shape of a user's own."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def choices(n):
        return [sentence(rng.random(), rng.randint(1, 6)) for _ in range(n)]

    for name, query, n in (
        ("hellaswag_val", "{}", 4),
        ("questions", "Question: {}?\nAnswer:", 4),
        ("pairs", "Question: {}?\nAnswer:", 2),
    ):
        rows = [{"query": query.format(sentence(i)), "choices": choices(n), "gold": rng.randrange(n)} for i in range(9)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_jsonl(
        folder / "contexts.jsonl",
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
