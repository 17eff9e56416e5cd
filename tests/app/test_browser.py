"""The explorer in a real browser: headless Chromium types, clicks, compares, saves and restores."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET

import pytest

gradio = pytest.importorskip("gradio", reason="the extra `app` is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

EVIL = '<script>window.hit=1</script><img src=x onerror="window.hit=1"> {{7*7}} ${window.hit=1}'


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Ctrl-C is what ends it, also where the tests run in a shell's background, whose children ignore it.
ATTNRES = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('attnres', run_name='__main__')"
)


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    """The explorer of two models, as a process of its own."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-c", ATTNRES, "app", str(folders["block"]), str(folders["full"]), "--port", str(port)]
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        for _ in range(3000):
            if b"open http" in log.read_bytes() or server.poll() is not None:
                break
            time.sleep(0.1)
        assert server.poll() is None and b"open http" in log.read_bytes(), log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def opened(browser, address):
    """A tab with the page, and what went wrong in it: words on its console, failed or foreign requests."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(60_000)
    wrong = []
    context.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("request", lambda r: r.url.startswith((address, "blob:", "data:")) or wrong.append(f"foreign {r.url}"))
    context.on("response", lambda r: r.status < 400 or wrong.append(f"{r.status} {r.url}"))
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#pane-1 [data-token]")
    yield page, wrong
    context.close()


@pytest.fixture
def tab(opened):
    page, wrong = opened
    yield page
    assert wrong == []


def saved(page, selector):
    with page.expect_download() as download:
        page.click(selector)
    return download.value.suggested_filename, download.value.path().read_bytes()


def loss(page, pane="#pane-0"):
    return page.inner_text(f"{pane} .loss")


def test_examples_are_ready(tab):
    assert tab.input_value("#text textarea").startswith("def ")
    tab.click("#example-prose")
    tab.wait_for_function("document.querySelector('#pane-1 .text').textContent.includes('ferry')")
    tab.click("#example-code")
    tab.wait_for_function("document.querySelector('#pane-1 .text').textContent.includes('class')")


def test_type_click_knock_out_compare_save_and_restore(tab, address):
    tab.fill("#text textarea", "def read(rows):\n    return rows\n")
    tab.wait_for_function("document.querySelector('#pane-0 .text').textContent.startsWith('def read(rows):↵')")
    assert tab.get_attribute("#pane-0 [data-token][aria-pressed]", "data-token") is not None

    tab.click("#pane-0 [data-token='2']")
    tab.wait_for_selector("#pane-1 [data-token='2'][aria-pressed]")  # both models follow
    assert "(token 2)" in tab.inner_text("#pane-0 .stack h3")
    tab.focus("#pane-0 [data-token='3']")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pane-0 [data-token='3'][aria-pressed]")

    tab.hover("#pane-0 .contributions [data-read='3'][data-source='1']")
    assert re.fullmatch(
        r"mlp 1 reads block 1: contribution -?[01]\.\d{3}, weight [01]\.\d{3}", tab.inner_text("#attnres-tip")
    )

    before = loss(tab)
    cell = tab.locator("#pane-0 .contributions [data-read='6'][data-source='0']")
    cell.hover()
    place = cell.bounding_box()
    cell.click()
    tab.wait_for_selector("#pane-0 .contributions .gone")
    assert "without 1 edge" in loss(tab) and "→" in tab.inner_text("#pane-0 .next table")
    assert "without" not in loss(tab, "#pane-1")
    # What changed is in sight, and the cell is where it was.
    assert cell.bounding_box() == pytest.approx(place, abs=2)
    change = tab.locator("#pane-0 .next").bounding_box()
    assert change["y"] >= 0 and change["y"] + change["height"] <= 900
    tab.click("#pane-0 .stack [data-read='2'][data-source='0']")
    tab.wait_for_function("document.querySelectorAll('#pane-0 .contributions .gone').length === 2")
    assert "without 2 edges" in loss(tab)

    tab.click("#source input")
    tab.click("[role=option] >> text=change in loss")
    tab.wait_for_selector("text=Tokens by the change of their loss")

    name, figure = saved(tab, "#pane-0 .contributions [data-save=svg]")
    assert name == "attnres-contributions.svg" and b"<script" not in figure and b"var(" not in figure
    assert len(ET.fromstring(figure).findall(".//{*}rect[@data-read]")) == len(
        tab.query_selector_all("#pane-0 .contributions .edge")
    )
    name, picture = saved(tab, "#pane-0 .stack [data-save=png]")
    assert name == "attnres-stack.png" and picture.startswith(b"\x89PNG") and len(picture) > 5000
    name, data = saved(tab, "#json")
    assert name == "attnres-view.json"
    assert [len(model["knocked_out"]) for model in json.loads(data)["models"]] == [2, 0]

    other = tab.context.new_page()
    other.goto(tab.url)
    other.wait_for_selector("#pane-0 .gone")
    assert other.input_value("#text textarea") == "def read(rows):\n    return rows\n"
    assert other.inner_text("#pane-0") == tab.inner_text("#pane-0")
    assert other.inner_text("#pane-1") == tab.inner_text("#pane-1")

    tab.click("#reset")
    tab.wait_for_function("!document.querySelector('.gone')")
    assert loss(tab) == before

    other.close()


def test_keys_do_what_clicks_do(tab):
    at = "(({token, read, source}) => [token, read, source].join(' ').trim())(document.activeElement.dataset)"
    tab.focus("#pane-0 [data-token='0']")
    for key, place in [("ArrowRight", "1"), ("End", None), ("Home", "0"), ("ArrowDown", None), ("ArrowUp", "0")]:
        tab.keyboard.press(key)
        assert tab.evaluate(at) == place or place is None
    tab.focus("#pane-0 .contributions [tabindex='0']")
    for key, place in [("ArrowDown", "1 0"), ("ArrowRight", "1 1"), ("End", "6 3"), ("ArrowUp", "5 2")]:
        tab.keyboard.press(key)
        assert tab.evaluate(at) == place
    assert tab.inner_text("#attnres-tip").startswith("mlp 2 reads ")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pane-0 .contributions .gone")
    assert tab.evaluate(at) == "5 2"
    tab.keyboard.press(" ")
    tab.wait_for_function("!document.querySelector('.gone')")


def test_one_model_or_both(tab):
    tab.click("#models input")
    tab.click("[role=option] >> nth=1")
    tab.wait_for_selector("#pane-1", state="hidden")
    assert "full" in tab.inner_text("#pane-0 h2")
    left, right = (tab.locator(f"#pane-0 .{name}").bounding_box() for name in ("next", "contributions"))
    assert right["x"] > left["x"] + left["width"] and abs(right["y"] - left["y"]) < 20
    tab.click("#models input")
    tab.click("[role=option] >> nth=2")
    tab.wait_for_selector("#pane-1 [data-token]")
    assert "block" in tab.inner_text("#pane-0 h2")


def test_typed_code_stays_text(tab):
    tab.click("#text textarea")
    tab.keyboard.press("Control+A")
    tab.keyboard.insert_text(EVIL)
    tab.wait_for_function("text => document.querySelector('#pane-0 .text').textContent === text", arg=EVIL)
    assert tab.evaluate("window.hit") is None
    assert tab.query_selector("#panes script, #panes img") is None
    tab.click("#pane-0 [data-token='4']")
    tab.wait_for_selector("#pane-0 [data-token='4'][aria-pressed]")
    tab.reload()
    tab.wait_for_selector("#pane-0 [data-token='4'][aria-pressed]")
    assert tab.evaluate("window.hit") is None and tab.input_value("#text textarea") == EVIL


def test_bad_input_is_a_message_and_the_page_goes_on(tab, address):
    tab.fill("#text textarea", "")
    tab.wait_for_selector("text=there is no text")
    tab.fill("#text textarea", "Zq%" * 300)
    tab.wait_for_selector("text=here: shorten it")
    tab.fill("#text textarea", "x")
    tab.wait_for_selector("text=One token")
    tab.goto(f"{address}/?e=nonsense")
    tab.wait_for_selector("text=this link is damaged")
    tab.wait_for_selector("#pane-1 [data-token]")


def test_no_width_scrolls_sideways(tab):
    for width in (400, 800, 1280):
        tab.set_viewport_size({"width": width, "height": 850})
        tab.wait_for_timeout(100)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        boxes = [tab.query_selector(f"#pane-{i}").bounding_box() for i in range(2)]
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width >= 800)
        assert all(box["width"] > 300 for box in boxes)


@pytest.mark.parametrize("path", ["gradio_api/file=/etc/passwd", "gradio_api/upload", "gradio_api/info", "docs"])
def test_the_server_has_no_files_no_uploads_and_no_api(address, path):
    try:
        with urllib.request.urlopen(f"{address}/{path}", timeout=10) as answer:
            assert json.load(answer) == {"named_endpoints": {}, "unnamed_endpoints": {}}
    except urllib.error.HTTPError as error:
        assert error.code == 404
