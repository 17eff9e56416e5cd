import contextlib
import fnmatch
import importlib.util
import os
import random
import shutil
import time
from typing import Any

import pytest
import torch

from attnres.files import cache_dir, lock
from attnres.ops import cpu
from attnres.residuals import registry

if not torch.cuda.is_available():  # Triton's kernels run in its interpreter; to be said before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # a machine that only runs tests/gpu may lack it
    from hypothesis import settings

    # A run of the tests is that of the commit, on a slow machine too.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


@contextlib.contextmanager
def _forgetting():
    """What is registered inside is forgotten after it; gives the names that were registered so far."""
    names, files = dict(registry._MECHANISMS), dict(registry._FILES)
    yield lambda: sorted(set(registry._MECHANISMS) - set(names))
    for kept, now in ((names, registry._MECHANISMS), (files, registry._FILES)):
        now.clear()
        now.update(kept)


@pytest.fixture
def registered():
    """What a test registers is forgotten after it: the names of mechanisms that were registered in it so far."""
    with _forgetting() as names:
        yield names


@pytest.fixture(scope="module")
def registered_in_module():
    """What a module's tests and fixtures register is forgotten after its last test."""
    with _forgetting():
        yield


@pytest.fixture(params=["eager", "cpu"])
def backend(request, monkeypatch):
    """Every implementation of the read there is."""
    if request.param == "eager":
        monkeypatch.setattr(cpu, "load", lambda: None)
    elif cpu.load() is None:
        pytest.skip("no C compiler: the CPU kernels cannot be built")
    return request.param


KERNELS = cache_dir() / "kernels"  # before any test names another cache


@pytest.fixture(scope="session")
def empty_cache():
    """`empty_cache(folder)` makes a cache of the compiled kernels alone, which a child process would compile anew."""

    def make(folder):
        KERNELS.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(KERNELS)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)` returns a folder that `make` filled, in one of the processes that share out the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name, make):
        place = shared / name
        with lock(shared / f"{name}.lock", wait=True):
            if not (place / "made").exists():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                make(place)
                (place / "made").touch()
        return place

    return folder


@pytest.fixture(scope="session")
def save_tokenizer():
    """Writes a tokenizer of some vocabulary into a folder."""
    from saved import write_tokenizer

    return write_tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of models: two with depth reads, a plain one, and one with another tokenizer."""
    from saved import save_model

    root = tmp_path_factory.mktemp("models")
    return {
        "block": save_model(root / "block"),
        "full": save_model(root / "full", "full", seed=1),
        "plain": save_model(root / "plain", "standard", seed=2, plain=True),
        "standard": save_model(root / "standard", "standard", seed=2),
        "other": save_model(root / "other", seed=3, vocabulary=300),
    }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The prepared folder of 200 documents made of a few words."""
    from attnres.data import prepare

    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["stream", "read", "write", "source", "block", "depth", "query", "norm", "head", "layer"]
    for index in range(200):
        (folder / f"{index}.txt").write_text(" ".join(draw.choices(words, k=60)), encoding="utf-8")
    return prepare(str(folder), "bpe:280", out=folder / "tokens", held_out=0.2, progress=False).path


ENDS = pytest.StashKey[float]()
"""When the time of --seconds is over, by the monotonic clock."""
NOT_RUN = "its turn did not come in --seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="begin no test after so many; --seed shuffles the files")
    parser.addoption("--seed", default="0", help="a number or a word, for the order of files with --seconds")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[ENDS] = time.monotonic() + (session.config.getoption("seconds", None) or float("inf"))


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[ENDS]:
        pytest.skip(NOT_RUN)
    torch.manual_seed(0)  # for its fixtures


@pytest.hookimpl(tryfirst=True)  # after fixtures: those that other tests share were made for the first of them
def pytest_runtest_call(item: pytest.Item) -> None:
    """Let each test draw the same numbers, whatever ran before it in its process."""
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests were not run because the time was over."""
    seconds = config.getoption("seconds", None)
    if seconds is not None:
        count = sum(NOT_RUN in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
        terminalreporter.write_line(
            f"{count} tests were not run: {seconds:.0f} seconds were over; files in the order of --seed "
            f"{config.getoption('seed')}"
            if count
            else f"every test was run within {seconds:.0f} seconds"
        )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has a target of its own unless it is asked for.

    `quick` names the cases of a parametrised test that are in make test, in the way of fnmatch: the others are long.
    """
    cases: dict[str, list[bool]] = {}
    for item in items:
        if marker := item.get_closest_marker("quick"):
            quick = any(fnmatch.fnmatchcase(item.callspec.id, pattern) for pattern in marker.args)
            cases.setdefault(item.nodeid.partition("[")[0], []).append(quick)
            if not quick:
                item.add_marker("long")
    if config.getoption("seconds", None) is not None:  # tests of a file stay together, which share fixtures
        files = sorted({item.path for item in items})
        random.Random(config.getoption("seed")).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
    none = [name for name, quick in cases.items() if len(quick) > 1 and not any(quick)]
    if none:
        raise pytest.UsageError(f"no case of {', '.join(none)} is quick")
    left = {marker for marker in ("scale", "long") if marker not in config.getoption("markexpr", "")}
    out = {item for item in items if any(item.get_closest_marker(marker) for marker in left)}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
