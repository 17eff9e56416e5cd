"""Words that tests make their texts of."""

import random

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box up jugs of liquid zinc".split(" ")


def sentence(seed: float, words: int = 12) -> str:
    """Some of them, others for every seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))
