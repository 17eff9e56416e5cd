"""The documentation site in a real browser: nothing is cut at 1,280 pixels, pages fit a phone, links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import attnres
from attnres.cli import COMMANDS

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LARGEST = 12 * 1024
LONGER = {"log.md"}
"""Pages above `LARGEST` bytes: the studies' record in the repository, which is not in the navigation."""
CUT = """() => {
    const wider = (element) => element.scrollWidth > element.clientWidth + 1
    const name = (element) => element.tagName + ": " + element.textContent.trim().slice(0, 60)
    const boxes = [...document.querySelectorAll(".md-content pre > code, .md-content .md-typeset__scrollwrap")]
    return {
        page: document.documentElement.scrollWidth - innerWidth,
        cut: boxes.filter(wider).map(name),
        images: [...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src),
        formulas: [...document.querySelectorAll(".arithmatex")].map(name),
        back: getComputedStyle(document.body).backgroundColor,
    }
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=ROOT, env=variables, check=True)
    return folder


@pytest.mark.long
def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page, text in {
        "index.html": "I want to look inside",
        "api/attnres.residuals.html": (attnres.Residual.finish.__doc__ or "").split(";")[0],
        "contributing.html": "A mechanism",
        "results/index.html": "Should I use Attention Residuals?",
        "reference/families.html": "qwen3",
        "reference/formulas.html": "<math",
        "tutorials/look_inside.html": 'class="output"',
        "llms.txt": "reference/commands/train.html",
    }.items():
        assert text in (site / page).read_text(encoding="utf-8"), page
    assert {page.stem for page in (site / "reference/commands").iterdir()} == set(COMMANDS)
    overview = (site / "api/attnres.html").read_text(encoding="utf-8")
    order = [overview.index(f'id="attnres.{name}"') for name in ("attach", "train", "DepthReads", "RESIDUALS")]
    assert order == sorted(order)  # functions, classes, constants


@pytest.mark.long
def test_links_lead_to_a_page_and_a_place_in_it(site: Path) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    wrong = []
    for page, text in texts.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            name, _, fragment = unquote(unescape(target)).partition("#")
            if re.match(r"[a-z]+:", target) or (page.name == "404.html"):
                continue
            to = (page.parent / name).resolve() if name else page
            if not to.exists() or (fragment and to in texts and f'id="{fragment}"' not in unescape(texts[to])):
                wrong.append(f"{page.relative_to(site)}: {target}")
    assert not wrong


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])  # a theme's colours move no box
def test_nothing_is_cut(site: Path, width: int, scheme: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pages = sorted(page for page in site.rglob("*.html") if page.name not in ("404.html", "log.html", "results.html"))
    wrong = []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        for page in pages:
            tab.goto(page.as_uri(), wait_until="load")
            seen = tab.evaluate(CUT)
            name = page.relative_to(site)
            cut = seen["cut"] if width == 1280 else [one for one in seen["cut"] if one.startswith("CODE")]
            wrong += [f"{name}: {one}" for one in (*cut, *seen["images"], *seen["formulas"])]
            if seen["page"] > 0:
                wrong.append(f"{name}: the page is {seen['page']} pixels too wide")
            is_light = sum(map(int, re.findall(r"\d+", seen["back"])[:3])) > 380
            assert is_light == (scheme == "light"), name
        browser.close()
    assert len(pages) > 60 and not wrong, "\n".join(wrong)


def test_no_page_is_longer_than_a_reader_stays() -> None:
    docs = ROOT / "docs"
    sizes = {str(page.relative_to(docs)): page.stat().st_size for page in docs.rglob("*.md")}
    assert {name for name, size in sizes.items() if size > LARGEST} <= LONGER
