"""Where the code bases are found, and the table of docs/how-to/integrations.md that their tests fill in."""

import os
import re
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "integrations.md"
COLUMNS = (
    "code base",
    "how",
    "off-switch",
    "zero queries: outputs, gradients",
    "its optimizer",
    "compile",
    "checkpointing",
    "cache",
    "resume",
    "record, intervene",
    "last run",
)
"""Of the table; a test notes what it measured by the column's name."""

sys.path.append(str(ROOT / "build" / "integrations"))  # `make integrations` installs there; the environment goes first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table", action="store_true", help="write what was measured into docs/how-to/integrations.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # those of other people's code are theirs
    config.stash[ROWS], config.stash[FAILED] = {}, set()


ROWS = pytest.StashKey[dict[str, dict[str, str]]]()
FAILED = pytest.StashKey[set[str]]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    outcome = yield
    if outcome.get_result().failed:
        item.config.stash[FAILED].add(item.path.parent.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ROOT / "integrations" in item.path.parents:
            item.add_marker(pytest.mark.integrations)


@pytest.fixture
def note(request: pytest.FixtureRequest):
    """`note("compile", "fullgraph")` fills a column of the row of the test's code base."""
    row = request.config.stash[ROWS].setdefault(request.path.parent.name, {})

    def write(column: str, text: object) -> None:
        assert column in COLUMNS, column
        row[column] = str(text)

    return write


@pytest.fixture
def checkout():
    """`checkout("nanoGPT")` is the folder of that name in PEERS_PATH; without it the test is skipped."""

    def folder(name: str) -> Path:
        path = Path(os.environ.get("PEERS_PATH", "nowhere")) / name
        if not path.is_dir():
            pytest.skip(f"PEERS_PATH names no folder with a checkout {name}")
        return path

    return folder


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was measured into the rows of code bases whose tests passed; other cells and rows stay."""
    rows = session.config.stash[ROWS]
    if not session.config.getoption("--write-table"):
        return
    text = PAGE.read_text(encoding="utf-8")
    known = {match[1]: match[0] for match in re.finditer(r"(?m)^\| .*\(`integrations/(\w+)`\).*\n", text)}
    for name, row in rows.items():
        if name in session.config.stash[FAILED]:
            continue
        cells = [cell.strip() for cell in known.get(name, "").split("|")[1:-1]]
        row = dict(zip(COLUMNS, cells)) | row
        row["last run"] = str(date.today())
        title, _, version, *_ = (ROOT / "integrations" / name / "README.md").read_text(encoding="utf-8").splitlines()
        tried = version.removeprefix("Tried with ").rstrip(".")
        cells = [f"{title.removeprefix('# ')}, {tried} (`integrations/{name}`)"]
        known[name] = f"| {' | '.join(cells + [row.get(key, '-') for key in COLUMNS[1:]])} |\n"
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    start, end = "<!-- measured by make integrations -->\n", "<!-- end -->"
    before, rest = text.split(start)
    table = head + "".join(known[name] for name in sorted(known))
    PAGE.write_text(f"{before}{start}{table}{end}{rest.split(end)[1]}", encoding="utf-8")
