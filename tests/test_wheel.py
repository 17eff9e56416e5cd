"""What a user installs: the wheel made of the sdist holds all that the package reads at run time, and nothing else."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import attnres

ROOT = Path(__file__).parents[1]
SDIST = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
NAME = f"attention_residuals-{attnres.__version__}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of the sdist, as an index's users without a fitting wheel build it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"  # a build leaves files beside what it builds
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "docs")
    shutil.copytree(ROOT, source, ignore=left_out)
    subprocess.run([sys.executable, "-W", "ignore", "-c", SDIST, folder], cwd=source, check=True, capture_output=True)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run(command, cwd=folder / NAME, check=True, capture_output=True)
    return folder / f"{NAME}-py3-none-any.whl"


@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnres").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {"attnres/py.typed", "attnres/ops/cpu_kernels.c", "attnres/report/page.html"} <= package
    assert metadata["License-Expression"] == "Apache-2.0" and "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert {"app", "data", "eval", "all"} <= set(metadata.get_all("Provides-Extra", []))
    places = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["attnres"]
    urls = [url.split(", ")[1] for url in metadata.get_all("Project-URL", [])]
    assert urls == ["https://arxiv.org/abs/2603.15031", *filter(None, places.values())]


@pytest.mark.long
def test_it_works_where_nothing_else_of_ours_is(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, whose other packages are this one's: pip finds that they are all it requires."""
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    rest = sysconfig.get_path("purelib", vars={"base": tmp_path / "env", "platbase": tmp_path / "env"})
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["ATTNRES_CACHE"] = str(tmp_path / "cache")

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(python, "-m", "pip", "uninstall", "--yes", "setuptools")  # Python 3.11's venv brings an old one
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(rest) / "rest.pth").write_text("\n".join(others))
    run(python, "-m", "pip", "install", "--no-index", wheel)
    where = run(python, "-c", "import attnres; print(attnres.__file__)")
    assert Path(where.strip()).is_relative_to(rest)
    command = python.with_name("attnres")
    assert run(command, "--version") == f"attnres {attnres.__version__}\n"
    assert attnres.__version__ in run(command, "env")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    run(python, "-c", readme.split("```python\n")[1].split("```")[0])
