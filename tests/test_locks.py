"""What make installs is what constraints.txt says, and every file of it has a hash."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
APART = ("extras", "integrations")  # whose packages are not in the environment


def pins(text: str) -> dict[str, str]:
    """Versions by name, written as indexes write it."""
    return {re.sub("[_.]", "-", name.lower()): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_requirement_is_one_version_with_hashes(path: Path) -> None:
    entries = path.read_text().replace("\\\n", " ").strip().splitlines()
    assert len(entries) > 15
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.+]+( ; [^\\]*?)?(\s+--hash=sha256:[0-9a-f]{64})+", entry), entry[:80]


def test_locked_are_the_versions_of_the_constraints() -> None:
    """Torch has builds for CPUs and GPUs, so files of its own on every kind of machine: its version is pinned alone."""
    constraints = pins((ROOT / "constraints.txt").read_text())
    locked: dict[str, str] = {}
    for path in LOCKS:
        if path.stem not in APART:
            locked |= pins(path.read_text())
    assert locked | {"torch": constraints["torch"]} == constraints
    extras = pins((ROOT / "locks" / "extras.txt").read_text())
    assert {name: version for name, version in extras.items() if name in constraints}.items() <= constraints.items()
    assert {"onnx", "trackio"} <= extras.keys()


def test_the_package_is_built_with_the_locked_setuptools() -> None:
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed == f"setuptools=={pins((ROOT / 'locks' / 'demo.txt').read_text())['setuptools']}"


def test_the_licence_of_every_locked_package_is_told() -> None:
    rows = re.findall(
        r"(?m)^\| ([\w.-]+) \| ([\w.]+)\S* \| (.+) \|$", (ROOT / "docs" / "project" / "licences.md").read_text()
    )
    told = {re.sub("[_.]", "-", name.lower()): version for name, version, licence in rows if licence != "not said"}
    told.pop("package")  # the table's head
    assert told == pins((ROOT / "constraints.txt").read_text())
