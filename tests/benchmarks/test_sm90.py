"""The Triton kernels as an H100 would run them, compiled without one: no spills, and pipelining that happens."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sm90
from launch import PATIENCE_S

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NARROW_ENOUGH = 4096
SPILLED = {
    "8 sources, 3 reads, fp32, held, backward": 244,
    "4 sources, 7 reads, fp32, held, backward": 56,
}
"""Bytes a thread, as docs/explanation/kernels_checked.md has them."""

SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import sm90

asked = sys.argv[3:]
sm90.write(Path(sys.argv[2]), [sm90.build(each) for each in sm90.specimens() if sm90.digest(each) in asked])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each kernel at the widest width that must not spill, as the record of `benchmarks/sm90.py` has it; what was
    changed since is compiled here, and of each kernel's code what compiles fastest."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: there is nothing to compile")
    recorded = {row.get("digest"): row for row in json.loads(sm90.RECORD.read_text("utf-8"))["kernels"]}
    widest: dict[str, sm90.Specimen] = {}
    for specimen in sm90.specimens():
        if widest.get(specimen.name, specimen).width <= specimen.width <= NARROW_ENOUGH:
            widest[specimen.name] = specimen
    kernels = {sm90.digest(specimen): specimen.kernel.fn.__name__ for specimen in widest.values()}
    known = sorted(kernels.keys() & recorded.keys(), key=lambda digest: -recorded[digest]["seconds"])
    fastest = {kernels[digest]: digest for digest in known}.values()
    folder = tmp_path_factory.mktemp("sm90")
    # A process of its own: an interpreted kernel cannot be compiled. It leaves nothing in the user's cache.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    asked = sorted({*fastest, *(kernels.keys() - recorded.keys())})
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS), str(folder / "sm90.json"), *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    rows = {row["digest"]: row for row in json.loads((folder / "sm90.json").read_text())["kernels"]}
    assert rows.keys() == set(asked)
    for digest in fastest:
        assert rows[digest] | {"seconds": 0} == recorded[digest] | {"seconds": 0}, "python benchmarks/sm90.py --json"
    return [rows.get(digest) or recorded[digest] for digest in kernels]


def test_specimens_are_told_apart_and_fit_their_kernels() -> None:
    pytest.importorskip("triton")
    specimens = list(sm90.specimens())
    assert len({(specimen.name, specimen.width) for specimen in specimens}) == len(specimens) > 50
    assert all(set(specimen.signature) == set(specimen.kernel.arg_names) for specimen in specimens)
    assert len({sm90.digest(specimen) for specimen in specimens}) == len(specimens)
    assert sm90.digest(specimens[0]) != sm90.digest(specimens[0]._replace(options={"num_warps": 2, "num_stages": 9}))


def named(kernel: dict[str, Any]) -> str:
    return f"{kernel['name']} at d={kernel['width']}"


@pytest.mark.long
def test_nothing_spills(built: list[dict[str, Any]]) -> None:
    """But for held programs that an H200 ran faster so than as tiles without spills, by as much as the page says."""
    spilled = [
        f"{named(k)}: {k['spill_stores']} B stored, {k['spill_loads']} B loaded"
        for k in built
        if max(k["spill_stores"], k["spill_loads"]) > SPILLED.get(k["name"], 0)
    ]
    assert built
    assert not spilled, "\n".join(spilled)


@pytest.mark.long
def test_every_kernel_fits_on_a_multiprocessor(built: list[dict[str, Any]]) -> None:
    assert not [f"{named(k)}: {k['shared']} B shared, {k['registers']} registers" for k in built if not k["ctas"]]


@pytest.mark.long
def test_software_pipelines_copy_16_bytes_at_a_time_and_asynchronously(built: list[dict[str, Any]]) -> None:
    pipelined = [k for k in built if k["stages"] > 1]
    assert pipelined
    assert not [named(k) for k in pipelined if not k["async_16"]]


@pytest.mark.long
def test_vectors_are_loaded_and_stored_16_bytes_at_a_time(built: list[dict[str, Any]]) -> None:
    # What is narrower are scalars per token: never as many as there are wide accesses, never of 2 bytes.
    narrow = [
        f"{named(k)}: loads {k['loads']}, stores {k['stores']}"
        for k in built
        if "2" in k["loads"] or "2" in k["stores"] or not ("16" in k["loads"] or k["async_16"])
    ]
    assert not narrow
