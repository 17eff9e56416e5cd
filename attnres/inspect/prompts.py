"""Prompts that come with the package, by category: short texts to see routing depend on what is being said."""

import json
from functools import cache
from importlib.resources import files
from typing import Literal

Category = Literal["factual", "narrative", "code", "reasoning"]


@cache
def prompts() -> dict[Category, list[str]]:
    """Twelve texts of 30 to 80 words in each category, written for this package: statements of facts, pieces of
    stories, Python source, and worked problems."""
    return json.loads((files("attnres.inspect") / "prompts.json").read_text(encoding="utf-8"))
