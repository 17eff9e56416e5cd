"""What `mkdocs build` adds to the pages of this folder: commands, families and the API from code, the neighbours of
README, formulas as MathML, and llms.txt."""

import ast
import contextlib
import io
import json
import os
import re
import sys
import tomllib
from html import unescape
from pathlib import Path
from unittest import mock

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from attnres.cli import COMMANDS, main  # noqa: E402

PAGES = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
PACKAGES = ["", "ops", "residuals", "models", "data", "training", "evals", "inspect", "figures", "report"]
PACKAGES += ["comparison"]
NOTEBOOK = Path("tutorials/look_inside.ipynb")
WIDTH = "80"
"""Columns of a command's help, which is as wide as a block of code on the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository and name the site's own address, where pyproject.toml has them."""
    places = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["attnres"]
    config.repo_url, config.site_url = places["repository"] or None, places["site"] or None
    (reference,) = [pages for section in config.nav or [] for title, pages in section.items() if title == "Reference"]
    reference.insert(0, {"Commands": [{name: f"reference/commands/{name}.md"} for name in COMMANDS]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; links of README's neighbours to docs/ become links within the site."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for neighbour, file in PAGES.items():
            text = text.replace(f"]({file}", f"]({neighbour}")
        files.append(File.generated(config, page, content=text))
    for name in PACKAGES:
        package = f"attnres.{name}" if name else "attnres"
        files.append(File.generated(config, f"api/{package}.md", content=api(package)))
    for name, text in commands().items():
        files.append(File.generated(config, f"reference/commands/{name}.md", content=text))
    files.append(File.generated(config, "reference/families.md", content=families()))
    files.append(File.generated(config, NOTEBOOK.with_suffix(".md").as_posix(), content=notebook()))
    files.append(File.generated(config, "llms.txt", content=llms(config)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link to the page of the notebook, where the repository's pages link to the notebook."""
    return markdown.replace(f"{NOTEBOOK.name})", f"{NOTEBOOK.with_suffix('.md').name})")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    r"""Turn formulas, which the extension arithmatex leaves as \(...\) and \[...\], into MathML: no script, no font."""
    formula = r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>'
    display = {"span": "inline", "div": "block"}
    return re.sub(formula, lambda m: convert(unescape(m[2]), display=display[m[1]]), html, flags=re.DOTALL)


class Examples(griffe.Extension):
    """Make a block of code of the examples in docstrings, which Markdown would take for quotations (mkdocs.yml)."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Fence each paragraph of a docstring that begins with >>>."""
        if obj.docstring is not None:
            example = re.compile(r"^( *)(>>> (?:.+\n?)+)", flags=re.MULTILINE)
            obj.docstring.value = example.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    lines = re.sub(r" +# doctest: \+\w+$", "", example[0].rstrip(), flags=re.MULTILINE)
    return f"{example[1]}```pycon\n{lines}\n{example[1]}```\n"


def api(package: str) -> str:
    """Return the page of a package: what it exports, functions first, then classes, then constants."""
    path = ROOT / package.replace(".", "/") / "__init__.py"
    assigned = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    exported = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    names = [name for name in ast.literal_eval(exported[0]) if not name.startswith("__")] if exported else []
    names.sort(key=lambda name: (name.isupper(), name[0].isupper()))
    members = f"    options:\n      group_by_category: false\n      members: {names}\n" if names else ""
    return f"# {package}\n\n::: {package}\n{members}"


def commands() -> dict[str, str]:
    """Return a page for each command: what it is for, and its help as a terminal prints it."""
    return {
        name: f"# attnres {name}\n\n{about[0].upper()}{about[1:]}.\n\n```text\n{_help(name)}\n```\n"
        for name, about in COMMANDS.items()
    }


def families() -> str:
    """Return the table of `attnres families`."""
    from attnres.models import families_table

    rows = [("family", "model types", "converts", ""), ("---",) * 4]
    rows += [(row.family, ", ".join(row.model_types), row.kind, row.note) for row in families_table()]
    lead = "`attnres families` prints the same. A family that is not listed is probed by one forward pass."
    return f"# Families\n\n{lead}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def notebook() -> str:
    """Return the notebook as a page, with the outputs that `docs/run_notebook.py` put into it."""
    parts = []
    for cell in json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                parts.append(f'<div class="output">{"".join(data["text/html"])}</div>')
            elif "image/png" in data:
                parts.append(f'<img alt="output" src="data:image/png;base64,{data["image/png"]}">')
            else:
                parts.append(f"```text\n{''.join(data.get('text/plain', output.get('text', '')))}\n```")
    return "\n\n".join(parts)


def llms(config: MkDocsConfig) -> str:
    """Return llms.txt (llmstxt.org): what the package is, how an assistant uses it, and the pages by section."""
    guide = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split("\n", 2)[2].strip()
    lines = [f"# attnres\n\n> {config.site_description}\n\n{guide}\n"]
    for section in config.nav or []:
        for title, pages in section.items():
            entries = [("Home", pages)] if isinstance(pages, str) else [pair for one in pages for pair in _entries(one)]
            lines += [f"## {title}\n", *(f"- [{name}]({path.replace('.md', '.html')})" for name, path in entries), ""]
    return "\n".join(lines)


def _entries(entry: object) -> list[tuple[str, str]]:
    if isinstance(entry, str):
        return [(Path(entry).stem, entry)]
    assert isinstance(entry, dict)
    ((name, value),) = entry.items()
    return [(name, value)] if isinstance(value, str) else [pair for one in value for pair in _entries(one)]


def _help(command: str) -> str:
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text), mock.patch.dict(os.environ, COLUMNS=WIDTH):
        main([command, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue()).rstrip()
