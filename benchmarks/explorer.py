"""How long the explorer takes to answer, as its user sees it: from a key or click in headless Chromium to the new page.

    make demo
    python benchmarks/explorer.py                      # the demo's models; or MODEL, or MODEL MODEL2

The goal: an edit on a prompt of 200 tokens in half a second on 2 cores, the score of all edges of a prediction in ten.
"""

import argparse
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

from attnres.files import write_json
from attnres.training.environment import describe

CHARACTERS = 720
"""Of Python source: about 200 tokens of the demo's tokenizer."""
SHOWN = "start => shown && shown.view.text.replace(/\\s/g, '').startsWith(start)"
SETTLED = "shown && !busy && shown.panes.every((one) => one.error || one.scores && one.scores.done)"
"""No answer is under way, and all edges are scored."""
EDGE = ".depth .cell[data-e='6,0']"


def seconds(act: Callable[[], Any], done: Callable[[], Any]) -> float:
    """From an act to the page that shows it."""
    began = time.perf_counter()
    act()
    done()
    return time.perf_counter() - began


def until(page: Page, script: str, argument: str | None = None) -> None:
    """Wait until a script's value is true, a minute at most; the page's policy forbids Playwright's own way, eval."""
    end = time.monotonic() + 60
    while not page.evaluate(script, argument):
        if time.monotonic() > end:
            sys.exit(f"error: for a minute the page has not been so: {script}")
        page.wait_for_timeout(10)


def measure(page: Page, rounds: int) -> dict[str, Any]:
    """Times of a new text, a click on a token and a cut, `rounds` of each, none of which was kept; and until the edges
    of the prediction, or predictions, are scored after each new text."""
    source = Path(textwrap.__file__).read_text()
    times: dict[str, list[float]] = {name: [] for name in ("new text", "all scores", "token", "edge")}
    tokens = []
    for i in range(rounds + 1):  # the first warms up
        words = source[2000 + 40 * i : 2000 + 40 * i + CHARACTERS]
        if not i:
            page.evaluate("text => change({text, token: null, cuts: []})", words)
            until(page, "!busy")
            if error := page.evaluate("shown.panes.map((one) => one.error).find(Boolean)"):
                sys.exit(f"error: {error}")
        start = "".join(words.split())[:40]
        round_times = {
            "new text": seconds(
                lambda words=words: page.evaluate("text => change({text, token: null, cuts: []})", words),
                lambda start=start: until(page, SHOWN, start),
            ),
            "all scores": seconds(lambda: None, lambda: until(page, SETTLED)),
            "token": seconds(
                lambda i=i: page.click(f".text [data-t='{20 + i}']"),
                lambda i=i: page.wait_for_selector(f".text [data-t='{20 + i}'][aria-pressed=true]"),
            ),
            "edge": seconds(lambda: page.click(EDGE), lambda: until(page, "shown.view.cuts.length === 1")),
        }
        tokens.append(page.locator(".text [data-t]").count())
        until(page, SETTLED)
        for name, value in round_times.items() if i else ():
            times[name].append(value)
    figures = {name: {"median_s": statistics.median(row), "largest_s": max(row)} for name, row in times.items()}
    return {"tokens": sorted(tokens[1:]), "rounds": rounds, **figures}


@contextmanager
def opened(models: list[str]) -> Generator[tuple[Page, str]]:
    """The explorer of some models, the demo's where none are named, in headless Chromium; and what it said of them."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no chromium here: install it, for instance with apt-get install chromium")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "attnres", "app", *models, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stdout is not None
        says = next((line for line in server.stdout if "open http" in line), None)
        if says is None:
            sys.exit("error: the explorer did not start; its own words are above")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"http://127.0.0.1:{port}")
            page.wait_for_selector(".depth")
            yield page, says.split(": open")[0]
        finally:
            browser.close()
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="one or two; the demo's by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default="benchmarks/results/explorer_cpu.json")
    options = parser.parse_args()
    with opened(options.models) as (page, models):
        times = measure(page, options.rounds)
    for name in (name for name, value in times.items() if isinstance(value, dict)):
        print(f"{name}: {times[name]['median_s']:.2f} s, at most {times[name]['largest_s']:.2f} s")
    result = {
        "command": shlex.join(["python", "benchmarks/explorer.py", *sys.argv[1:]]),
        "environment": describe(torch.device("cpu"), "fp32"),
        "models": models,
        **times,
    }
    write_json(Path(options.out), result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
