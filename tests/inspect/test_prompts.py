"""The prompts that come with the package."""

import ast

from attnres.inspect.kinds import guess_language
from attnres.inspect.prompts import prompts


def test_every_category_has_twelve_different_prompts():
    assert list(prompts()) == ["factual", "narrative", "code", "reasoning"]
    texts = [text for part in prompts().values() for text in part]
    assert len(texts) == len(set(texts)) == 48


def test_only_the_code_is_code():
    for category, texts in prompts().items():
        assert {guess_language(text) for text in texts} == {"code" if category == "code" else "prose"}
    for text in prompts()["code"]:
        ast.parse(text)
