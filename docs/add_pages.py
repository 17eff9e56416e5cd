"""What `mkdocs build` adds to the pages of this folder: README and its neighbours, and the API from docstrings."""

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
PACKAGES = ["", "ops", "residuals", "models", "data", "training", "evals", "inspect", "figures", "report"]
PACKAGES += ["comparison"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository and name the site's own address, where pyproject.toml has them."""
    places = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["attnres"]
    config.repo_url, config.site_url = places["repository"] or None, places["site"] or None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; links of README to docs/ become links within the site."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name in PACKAGES:
        package = f"attnres.{name}" if name else "attnres"
        files.append(File.generated(config, f"api/{package}.md", content=f"# {package}\n\n::: {package}\n"))
    return files
