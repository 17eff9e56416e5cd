"""The examples in docstrings run. Only modules that have some are imported, so Gradio and Triton are not."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import attnres

PACKAGE = Path(attnres.__file__).parent
LAB = PACKAGE.with_name("lab")


def modules() -> dict[str, bool]:
    """Name of each module with examples -> whether any of them runs."""
    runnable = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")]):
        examples = re.findall(r"^ *>>> .*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if examples:
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            runnable[name] = any("doctest: +SKIP" not in example for example in examples)
    return runnable


@pytest.mark.parametrize(("name", "runs"), modules().items())
@pytest.mark.usefixtures("registered")
def test_the_examples_of_a_module_give_what_they_say(name, runs):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.failed == 0 and bool(result.attempted) is runs
