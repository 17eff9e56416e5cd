"""Other libraries are told when they are imported, and not before."""

import importlib
import subprocess
import sys

import pytest

from attnres.imports import when_imported


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package `lib_of_test` with a module `inner`, which are forgotten again."""
    folder = tmp_path / "lib_of_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in ("lib_of_test", "lib_of_test.inner"):
        sys.modules.pop(name, None)


def test_an_act_waits_for_the_module_and_comes_after_it(library):
    values = []
    for _ in range(2):
        when_imported("lib_of_test.inner", lambda module: values.append(module.VALUE))
    assert values == [] and "lib_of_test" not in sys.modules
    module = importlib.import_module("lib_of_test.inner")
    assert values == [1, 1]
    assert type(module.__loader__) is type(module.__spec__.loader) is type(subprocess.__loader__)
    when_imported("lib_of_test.inner", lambda module: values.append(module.VALUE + 1))
    assert values == [1, 1, 2]
    importlib.reload(module)
    assert values == [1, 1, 2]


def test_a_module_that_fails_acts_when_it_is_imported_again(library):
    values = []
    when_imported("lib_of_test.inner", lambda module: values.append(module.VALUE))
    (library / "inner.py").write_text("VALUE = 2 / 0\n")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("lib_of_test.inner")
    (library / "inner.py").write_text("VALUE = 3  # again\n")
    importlib.invalidate_caches()
    importlib.import_module("lib_of_test.inner")
    assert values == [3]


def test_a_module_that_is_not_there_is_still_missing():
    when_imported("no_such_library", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        importlib.import_module("no_such_library")
