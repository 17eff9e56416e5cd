"""What `pip wheel .` makes holds all that the package reads at run time, and nothing else: no `lab/`, no tests."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import attnres

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files beside what it builds
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "docs")
    )
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"attnres-{attnres.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"attnres-{attnres.__version__}.dist-info/METADATA").decode()
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnres").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {"attnres/py.typed", "attnres/ops/cpu_kernels.c", "attnres/report/page.html"} <= package
    assert "License-Expression: Apache-2.0" in metadata and "Classifier: Typing :: Typed" in metadata
