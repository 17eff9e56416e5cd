"""The URLs of the package: those of [tool.attnres] in pyproject.toml that exist. All else is in pyproject.toml."""

import tomllib
from pathlib import Path

from setuptools import setup

places = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))["tool"]["attnres"]
found = {"Repository": places["repository"], "Documentation": places["site"]}
setup(project_urls={"Paper": "https://arxiv.org/abs/2603.15031"} | {name: url for name, url in found.items() if url})
