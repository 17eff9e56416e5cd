"""`attnres env` says which backend a read takes, and names the extras by what pyproject.toml calls them."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import attnres
from attnres import cli
from attnres.commands.env import EXTRAS, PACKAGES
from attnres.ops import cpu, explain

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def env(capsys):
    """`env(*arguments)` returns what the command prints."""

    def run(*arguments: str) -> str:
        cli.main(["env", *arguments])
        return capsys.readouterr().out

    return run


def test_the_json_agrees_with_the_library(env):
    facts = json.loads(env("--json"))
    assert (facts["attnres"], facts["packages"]["torch"]) == (attnres.__version__, torch.__version__)
    backends = {row["dtype"]: row["backend"] for row in facts["reads"] if row["device"] == "cpu"}
    for dtype in (torch.float32, torch.float16, torch.float64):
        assert backends[str(dtype).removeprefix("torch.")] == explain([torch.zeros(1, 32, dtype=dtype)]).backend
    assert "cpu" in facts["cuda_graphs"]["cpu"] and len(facts["cuda_graphs"]) == 1 + len(facts["cuda"])
    assert len(facts["cuda"]) == torch.cuda.device_count() and bool(facts["cuda"]) != bool(facts["no_cuda"])


def test_why_the_kernels_are_not_used_is_said(env):
    with cpu.switched(False):
        lines = env().splitlines()
    assert any("cpu" in line and "plain torch" in line and "ATTNRES_CPU_KERNELS is 0" in line for line in lines)


def test_packages_are_those_of_the_project():
    extras = {
        (name, package.split("==")[0].split(">=")[0])
        for name, packages in PROJECT["optional-dependencies"].items()
        for package in packages
    }
    assert {(extra, package) for package, extra in EXTRAS.items()} <= extras
    assert set(PACKAGES) <= {package.split(">=")[0] for package in PROJECT["dependencies"]}
