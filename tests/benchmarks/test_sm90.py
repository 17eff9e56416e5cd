"""The Triton kernels as an H100 would run them, compiled without one: no spills, and pipelining that happens."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sm90
from launch import PATIENCE_S

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NARROW_ENOUGH = 4096
# Held programs at all widths, other kernels at the widest width that must not spill: as the record has them, if they
# were compiled from the same code. What was not is compiled, and of each kernel what compiles fastest, which must be as
# recorded.
SCRIPT = """
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import sm90

widest = {}
for specimen in sm90.specimens():
    if "held" in specimen.name:
        widest[specimen.name, specimen.width] = specimen
    elif widest.get(specimen.name, specimen).width <= specimen.width <= int(sys.argv[3]):
        widest[specimen.name] = specimen
specimens = {sm90.digest(specimen): specimen for specimen in widest.values()}
recorded = {row["digest"]: row for row in json.loads(sm90.RECORD.read_text("utf-8"))["kernels"] if "digest" in row}
known = sorted(specimens.keys() & recorded.keys(), key=lambda digest: -recorded[digest]["seconds"])
fastest = {specimens[digest].kernel.fn.__name__: digest for digest in known}.values()
rows = {digest: recorded[digest] for digest in known}
for digest in {*fastest, *(specimens.keys() - recorded.keys())}:
    rows[digest] = json.loads(json.dumps(asdict(sm90.build(specimens[digest]))))
    same = rows[digest] | {"seconds": 0} == recorded.get(digest, rows[digest]) | {"seconds": 0}
    assert same, f"{specimens[digest].name} is not as recorded: python benchmarks/sm90.py --json {sm90.RECORD}"
Path(sys.argv[2]).write_text(json.dumps(list(rows.values())))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: there is nothing to compile")
    folder = tmp_path_factory.mktemp("sm90")
    # A process of its own: an interpreted kernel cannot be compiled. It leaves nothing in the user's cache.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS), str(folder / "sm90.json"), str(NARROW_ENOUGH)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "sm90.json").read_text())


def test_specimens_are_told_apart_and_fit_their_kernels() -> None:
    pytest.importorskip("triton")
    specimens = list(sm90.specimens())
    assert len({(specimen.name, specimen.width) for specimen in specimens}) == len(specimens) > 50
    assert all(set(specimen.signature) == set(specimen.kernel.arg_names) for specimen in specimens)
    assert len({sm90.digest(specimen) for specimen in specimens}) == len(specimens)
    assert sm90.digest(specimens[0]) != sm90.digest(specimens[0]._replace(options={"num_warps": 2, "num_stages": 9}))


def named(kernel: dict[str, Any]) -> str:
    return f"{kernel['name']} at d={kernel['width']}"


def spilled(kernels: list[dict[str, Any]]) -> list[str]:
    return [
        f"{named(k)}: {k['spill_stores']} B stored, {k['spill_loads']} B loaded"
        for k in kernels
        if k["spill_stores"] or k["spill_loads"]
    ]


def test_the_last_shape_of_every_row_of_held_programs_is_compiled() -> None:
    """A shape with more reads, or with more values a thread, takes another row, or tiles."""
    sealed = pytest.importorskip("attnres.ops.gpu.sealed")
    shapes = {specimen_shape(specimen) for specimen in sm90.specimens() if "held" in specimen.name}
    for (wide, backward), rows in sealed.HELD.items():
        reached = set[int]()
        for width, n, reads, of_fp32, is_backward in shapes:
            if (of_fp32, is_backward) == (wide, backward):
                found = sealed._held(n, reads, width, 4 if wide else 2, backward=backward)
                reached.add(found[1] * found[2])
        assert reached == {every for _, _, every in rows}


def specimen_shape(specimen: Any) -> tuple[int, int, int, bool, bool]:
    """Width, sources, reads, whether they are fp32, whether it is a backward."""
    n, reads = specimen.constants["N"], specimen.constants["S"]
    return specimen.width, n, reads, "fp32" in specimen.name, "backward" in specimen.name


def test_the_page_has_the_numbers_of_the_record() -> None:
    """Of every kernel with a row of its own, and of held programs by their sources, reads and width."""
    record = json.loads(sm90.RECORD.read_text("utf-8"))["kernels"]
    kernels, found = {(kernel["name"], kernel["width"]): kernel for kernel in record}, Counter[str]()
    page = (BENCHMARKS.parent / "docs" / "explanation" / "kernels_checked.md").read_text("utf-8")
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        shape = re.fullmatch(r"(\d+), (\d+), (\d+)", cells[0])
        if shape:
            name = f"{shape[1]} sources, {shape[2]} reads, fp32, held"
            forward, backward = (kernels[f"{name}, {way}", int(shape[3])] for way in ("forward", "backward"))
            found[f"{len(cells)} cells"] += 1
            if len(cells) == 5:
                assert [cells[2], cells[4]] == [str(kernel["barriers"]) for kernel in (forward, backward)], line
            else:
                warps = backward["ctas"] * backward["warps"]
                now = [backward["spill_stores"], backward["registers"], warps]
                assert cells[3:] == [str(number) for number in now], line
        elif len(cells) == 6 and cells[1].isdecimal():
            kernel = kernels[cells[0], int(cells[1])]
            spilled = f"{kernel['spill_stores']} B" if kernel["spill_stores"] else "0"
            assert cells[2:] == [str(kernel["registers"]), spilled, str(kernel["async_16"]), str(kernel["ctas"])], line
            found["kernels"] += 1
    assert found == {"5 cells": 4, "6 cells": 4, "kernels": 22}


@pytest.mark.long
def test_nothing_spills(built: list[dict[str, Any]]) -> None:
    assert built
    assert not spilled(built), "\n".join(spilled(built))


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
