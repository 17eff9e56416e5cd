"""Pictures of the explorer for the documents, in headless Chromium: what a reader of the docs sees is what there is.

    python benchmarks/views.py RUN                     # explorer_views.png of docs/images

It has the page with an edge cut, patched from another text, with an earlier step of the run beside it where the run
kept one (`--keep-at`), dark, and at 400 pixels.
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

from explorer import SETTLED, opened, until
from PIL import Image
from playwright.sync_api import Page

WIDTH, HEIGHT = 1440, 900
COLUMN, GAP = 720, 16
"""Pixels of the picture that a view has at most from left to right, and between two."""


def picture(page: Page) -> Image.Image:
    """The visible part of the page, once no answer is under way."""
    until(page, SETTLED)
    return Image.open(io.BytesIO(page.screenshot()))


def views(page: Page) -> Iterator[Image.Image]:
    """The views of one model."""
    page.click(".rank tr >> nth=0")
    page.wait_for_selector("#tray .chip")
    yield picture(page)
    page.click("[data-undo=all]")
    # What follows a word that the other text has not: the two predictions differ.
    page.evaluate("change({token: shown.panes[0].names.findIndex((one) => /count|man/.test(one))})")
    picture(page)
    page.click("[role=tab][data-tab=patch]")
    page.wait_for_selector("#other")
    page.fill("#other", page.evaluate("view.text.replace('count', 'total').replace('man', 'woman')"))
    page.click("[data-patch]")
    until(page, "!document.body.dataset.working")
    yield picture(page)
    page.click("[data-tab=explain]")
    if page.is_visible("#beside"):
        page.select_option("#beside", index=1)
        until(page, "shown.panes.length === 2")
        until(page, SETTLED)
        page.locator(".sheet").scroll_into_view_if_needed()
        page.evaluate("scrollBy(0, 500)")
        yield picture(page)
        page.select_option("#beside", index=0)
        until(page, "shown.panes.length === 1")
    until(page, SETTLED)
    page.click("#theme")
    page.evaluate("scrollTo(0, 0)")
    yield picture(page)
    page.click("#theme")
    page.set_viewport_size({"width": 400, "height": HEIGHT})
    yield picture(page)


def sheet(shots: list[Image.Image]) -> Image.Image:
    """Put pictures side by side, two a row, each at most a column wide."""
    small = [shot.resize((width := min(COLUMN, shot.width), shot.height * width // shot.width)) for shot in shots]
    rows = [small[place : place + 2] for place in range(0, len(small), 2)]
    heights = [max(shot.height for shot in row) for row in rows]
    whole = Image.new("RGB", (2 * COLUMN + GAP, sum(heights) + GAP * (len(rows) - 1)), "white")
    for i, row in enumerate(rows):
        for j, shot in enumerate(row):
            whole.paste(shot, (j * (COLUMN + GAP), sum(heights[:i]) + GAP * i))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    with opened([options.model]) as (page, _):
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        until(page, SETTLED)
        sheet(list(views(page))).save(options.out / "explorer_views.png")


if __name__ == "__main__":
    main()
