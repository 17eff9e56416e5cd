"""Pictures of the explorer for the documents, in headless Chromium: what a reader of the docs sees is what there is.

    make demo
    python benchmarks/views.py                         # explorer.png and explorer_views.png of docs/images

`explorer.png` is the first model alone, as it opens. `explorer_views.png` has two models side by side, a row a width:
as they open, an edge cut, all edges of a prediction scored, tokens by what the cut does to their loss, the difference.
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

from explorer import opened, until
from PIL import Image
from playwright.sync_api import Page

WIDTHS = (1920, 1280, 400)
HEIGHT = 900
COLUMN, GAP = 480, 16
"""Pixels of the picture that a view has at most from left to right, and between two."""
EDGE = "#pane-0 .contributions [data-read='3'][data-source='1']"
"""The second MLP's read of the first block."""


def settle(page: Page) -> None:
    """Wait until no answer is under way."""
    until(page, "document.querySelector('#panes').ariaBusy === 'false'")


def show(page: Page, selector: str) -> None:
    """Bring an element to the top, below the line that stays in sight."""
    page.locator(selector).evaluate("at => window.scrollTo(0, at.getBoundingClientRect().top + window.scrollY - 80)")


def views(page: Page) -> Iterator[Image.Image]:
    """The five views of two models, as the page's visible part."""

    def view() -> Image.Image:
        settle(page)
        return Image.open(io.BytesIO(page.screenshot()))

    yield view()
    page.click(EDGE)
    page.wait_for_selector("#pane-0 .contributions .gone")
    show(page, "#pane-0 .contributions")
    yield view()
    if not page.locator("#pane-0 .scores .edge").count():  # what was scored stays
        page.click("#pane-0 [data-score]")
        page.wait_for_selector("#pane-0 .scores .edge", timeout=120_000)
    show(page, "#pane-0 .scores")
    yield view()
    page.select_option("#source", label="change in loss")
    page.wait_for_selector("text=Tokens by the change of their loss")
    show(page, "#pane-0 .text")
    yield view()
    page.click("#theme")
    show(page, "#between")
    yield view()


def montage(rows: list[list[Image.Image]]) -> Image.Image:
    """Views in a grid, a row a width, each in the middle of its column."""
    small = []
    for row in rows:
        scale = min(COLUMN / row[0].width, 0.6)
        size = (round(row[0].width * scale), round(row[0].height * scale))
        small.append([view.resize(size, Image.Resampling.LANCZOS) for view in row])
    height = sum(row[0].height + GAP for row in small) + GAP
    picture = Image.new("RGB", (len(small[0]) * (COLUMN + GAP) + GAP, height), "#e5e7eb")
    top = GAP
    for row in small:
        for i, view in enumerate(row):
            picture.paste(view, (GAP + i * (COLUMN + GAP) + (COLUMN - view.width) // 2, top))
        top += row[0].height + GAP
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="two; the demo's by default")
    parser.add_argument("--out", default="docs/images")
    options = parser.parse_args()
    out = Path(options.out)
    with opened(options.models) as (first, _):
        browser, address = first.context.browser, first.url
        assert browser is not None

        def fresh(width: int, height: int = HEIGHT) -> Page:
            """The page as a new visitor sees it."""
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(address)
            page.wait_for_selector("#pane-1 [data-token]")
            return page

        montage([list(views(fresh(width))) for width in WIDTHS]).quantize(256).save(out / "explorer_views.png")
        page = fresh(1280, 1720)
        page.select_option("#beside select", label="none")
        page.wait_for_selector("#pane-1", state="detached")
        settle(page)
        page.screenshot(path=out / "explorer.png")
    print(f"wrote {out / 'explorer.png'} and {out / 'explorer_views.png'}")


if __name__ == "__main__":
    main()
