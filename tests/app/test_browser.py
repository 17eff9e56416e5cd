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

from attnres.app.state import View, encode

pytest.importorskip("uvicorn", reason="the extra `app` is not installed")
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
    texts = tmp_path_factory.mktemp("corpus")
    (texts / "a.txt").write_text("The quick brown fox jumps over the lazy dog.")
    models = [str(folders["block"]), str(folders["full"])]
    command = [sys.executable, "-c", ATTNRES, "app", *models, "--port", str(port), "--corpus", str(texts)]
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
    settled(page)
    yield page
    settled(page)
    assert wrong == []


def saved(page, selector):
    with page.expect_download() as download:
        page.click(selector)
    return download.value.suggested_filename, download.value.path().read_bytes()


def loss(page, pane="#pane-0"):
    return page.inner_text(f"{pane} .loss")


def settled(page):
    """Wait until no answer is under way: each replaces what the panes hold."""
    until(page, "document.querySelector('#panes').ariaBusy === 'false'")


def widest(page, read):
    """The segment of a read of the chosen token, in the first half, that is clicked most easily."""
    settled(page)
    bars = page.locator(f"#pane-0 .stack [data-read='{read}']")
    widths = bars.evaluate_all("bars => bars.map((bar) => [bar.getBoundingClientRect().width, bar.dataset.source])")
    return f"#pane-0 .stack [data-read='{read}'][data-source='{max(widths)[1]}']"


def in_sight(page, selector):
    settled(page)
    box, height = page.locator(selector).bounding_box(), page.viewport_size["height"]
    assert box["y"] >= -1 and box["y"] + box["height"] <= height, (selector, box)


def until(page, script, arg=None):
    """Wait until a script's value is true; the page's policy forbids Playwright's own way, which is eval."""
    last = time.monotonic() + 60
    while not page.evaluate(script, arg):
        assert time.monotonic() < last, script
        time.sleep(0.05)


def gone(page, count, pane="#pane-0"):
    script = "([pane, count]) => document.querySelectorAll(pane + ' .contributions .gone').length === count"
    until(page, script, [pane, count])


@pytest.mark.long
def test_examples_are_ready(tab):
    assert tab.input_value("#text textarea").startswith("def ")
    tab.click("[data-example=prose]")
    until(tab, "document.querySelector('#pane-1 .text').textContent.includes('ferry')")
    tab.click("[data-example=code]")
    until(tab, "document.querySelector('#pane-1 .text').textContent.includes('class')")


def tip_over(tab, selector):
    """What stands beside the pointer over an element, which an answer may still replace."""
    for _ in range(50):
        tab.mouse.move(0, 0)
        tab.hover(selector)
        if text := tab.inner_text("#attnres-tip"):
            return text
        tab.wait_for_timeout(100)
    raise AssertionError(f"no tip over {selector}")


@pytest.mark.long
def test_type_click_knock_out_compare_save_and_restore(tab, address):
    tab.fill("#text textarea", "def read(rows):\n    return rows\n")
    until(tab, "document.querySelector('#pane-0 .text').textContent.startsWith('def read(rows):↵')")
    assert tab.get_attribute("#pane-0 [data-token][aria-pressed=true]", "data-token") is not None

    tab.click("#pane-0 [data-token='2']")
    tab.wait_for_selector("#pane-1 [data-token='2'][aria-pressed=true]")  # both models follow
    settled(tab)
    assert "(token 2)" in tab.inner_text("#pane-0 .stack h3")
    tab.focus("#pane-0 [data-token='3']")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pane-0 [data-token='3'][aria-pressed=true]")

    tip = tip_over(tab, "#pane-0 .contributions [data-read='3'][data-source='1']")
    assert re.fullmatch(r"mlp 1 reads block 1: contribution −?[01]\.\d{3}, weight [01]\.\d{3}", tip)

    settled(tab)
    before = loss(tab)
    cell = tab.locator("#pane-0 .contributions [data-read='6'][data-source='0']")
    cell.hover()
    place = cell.bounding_box()
    cell.click()
    tab.wait_for_selector("#pane-0 .contributions .gone")
    settled(tab)
    assert "without 1 edge" in loss(tab) and "→" in tab.inner_text("#pane-0 .next table")
    assert "without" not in loss(tab, "#pane-1")
    # What changed is in sight, and said; the cell is where it was.
    assert cell.get_attribute("aria-pressed") == "true" and "without 1 edge" in tab.text_content("#live")
    assert tab.inner_text("#pane-0 .cuts li").startswith("output ← embedding at all tokens")
    assert cell.bounding_box() == pytest.approx(place, abs=2)
    in_sight(tab, "#pane-0 .effect")
    tab.click(widest(tab, 2))
    gone(tab, 2)
    assert "without 2 edges" in loss(tab)

    tab.select_option("#source", label="change in loss")
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
    settled(other)
    assert other.input_value("#text textarea") == "def read(rows):\n    return rows\n"
    assert other.inner_text("#pane-0") == tab.inner_text("#pane-0")
    assert other.inner_text("#pane-1") == tab.inner_text("#pane-1")

    tab.click("#reset")
    until(tab, "!document.querySelector('.gone')")
    assert loss(tab) == before

    other.close()


def test_keys_do_what_clicks_do(tab):
    at = "(({token, read, source}) => [token, read, source].join(' ').trim())(document.activeElement.dataset)"
    tab.focus("#pane-0 [data-token='0']")
    for key, place in [("ArrowRight", "1"), ("End", None), ("Home", "0"), ("ArrowDown", None), ("ArrowUp", "0")]:
        tab.keyboard.press(key)
        assert tab.evaluate(at) == place or place is None
    tab.focus("#pane-0 .contributions .edge[tabindex='0']")
    for key, place in [("ArrowDown", "1 0"), ("ArrowRight", "1 1"), ("End", "6 3"), ("ArrowUp", "5 2")]:
        tab.keyboard.press(key)
        assert tab.evaluate(at) == place
    assert tab.inner_text("#attnres-tip").startswith("mlp 2 reads ")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pane-0 .contributions .gone")
    assert tab.evaluate(at) == "5 2"
    tab.keyboard.press(" ")
    until(tab, "!document.querySelector('.gone')")


@pytest.mark.parametrize("figure", ["#pane-0 .queries", "#pane-1 .attended", "#between .difference"])
def test_keys_reach_every_cell(tab, figure):
    words = "document.activeElement.getAttribute('aria-label')"
    first = tab.get_attribute(f"{figure} .cell[tabindex='0']", "aria-label")
    tab.focus(f"{figure} h3 button:last-of-type")
    stops = []
    while first not in stops and len(stops) < 4:  # the button, a box that scrolls, the first cell
        tab.keyboard.press("Tab")
        stops.append(tab.evaluate(words))
    assert stops[-1] == first == tab.inner_text("#attnres-tip")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(words) == tab.inner_text("#attnres-tip") != first
    tab.keyboard.press("End")
    cells = tab.locator(f"{figure} .cell")
    assert tab.evaluate(words) == cells.last.get_attribute("aria-label")
    tab.keyboard.press("Enter")
    assert loss(tab).count("without") == 0


@pytest.mark.long
def test_the_focus_stays_where_it_was(tab):
    at = "document.activeElement.closest('section,.cuts')?.classList[0]"
    cells = ["#pane-0 .contributions [data-read='6'][data-source='0']", widest(tab, 2)]
    for count, cell in enumerate(cells, 1):
        tab.click(cell)
        gone(tab, count)
    for count in (1, 0):
        tab.focus("#pane-0 .cuts button")
        tab.keyboard.press("Enter")
        gone(tab, count)
        settled(tab)
        assert tab.evaluate(at) == "cuts"
    tab.focus("#pane-0 .contributions [data-save=svg]")
    with tab.expect_download():
        tab.keyboard.press("Enter")
    tab.evaluate("answer()")
    settled(tab)
    assert tab.evaluate("document.activeElement.matches('#pane-0 .contributions [data-save=svg]')")
    tab.click("#pane-0 [data-token='1']")
    tab.wait_for_selector("#pane-0 [data-score='1']")
    settled(tab)
    tab.focus("#pane-0 [data-score]")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#pane-0 .scores [data-read='6']")
    settled(tab)
    assert tab.evaluate(at) == "scores"


def test_no_click_is_lost_while_it_answers(tab):
    """Clicks 50 ms apart, by the page's own clock, on a server that needs longer than that."""
    cells = [[1, 0], [2, 0], [2, 1], [3, 1], [3, 2], [4, 1], [5, 2], [6, 1]]
    tab.evaluate(
        """async (cells) => { for (const [read, source] of cells) {
          document.querySelector(`#pane-0 .contributions [data-read='${read}'][data-source='${source}']`)
            .dispatchEvent(new MouseEvent("click", {bubbles: true}));
          await new Promise((done) => setTimeout(done, 50));
        } }""",
        cells,
    )
    gone(tab, 8)
    assert "without 8 edges" in loss(tab)
    tab.click("#undo")
    gone(tab, 7)
    for count in (8, 7, 6, 5, 4):  # each click was a step
        tab.evaluate("history.back()")
        gone(tab, count)
    tab.evaluate("history.forward()")
    gone(tab, 5)
    tab.reload()
    gone(tab, 5)
    tab.click("#pane-0 .cuts li:nth-child(2) button")
    gone(tab, 4)
    tab.click("#reset")
    gone(tab, 0)


def test_a_cut_of_one_token(tab):
    tab.click("#pane-0 [data-token='2']")
    tab.wait_for_selector("#pane-0 [data-token='2'][aria-pressed=true]")
    tab.check("#span input[value=one]")
    tab.click(widest(tab, 6))
    tab.wait_for_selector("#pane-0 .cuts li")
    assert "at token 2" in tab.inner_text("#pane-0 .cuts li")
    assert tab.locator("#pane-0 .contributions .gone").count() == 0
    tab.check("#span input[value=all]")
    tab.click("#reset")
    tab.wait_for_selector("#pane-0 .cuts li", state="detached")


def test_one_button_scores_all_edges(tab):
    tab.click("#pane-1 [data-score]")
    tab.wait_for_selector("#pane-1 .scores [data-read='6']")
    label = tab.get_attribute("#pane-1 .scores [data-read='6'][data-source='1']", "aria-label")
    assert re.fullmatch(r"output reads attention 0: ln p [+−]?[\d.]+ without it", label)
    assert tab.query_selector("#pane-1 .graph svg path") and tab.query_selector("#pane-0 [data-score]")
    name, figure = saved(tab, "#pane-1 .graph [data-save=svg]")
    assert name == "attnres-graph.svg" and b"var(" not in figure and ET.fromstring(figure) is not None


def test_scores_that_come_while_an_answer_is_under_way_are_shown(tab):
    """The answer was made without them, and arrives after them."""
    held = []
    tab.route("**/show", lambda route: route.continue_() if held else held.append((route, route.fetch())))
    tab.click("#by input[value=weight]")
    tab.click("#pane-0 [data-score]")
    until(tab, "document.querySelector('#score-progress').hidden")
    ((route, response),) = held
    route.fulfill(response=response)
    tab.wait_for_selector("#pane-0 .scores [data-read='6']")
    tab.unroute("**/show")
    tab.click("#by input[value=contribution]")


def test_what_is_scored_goes_on_while_the_page_is_drawn_anew(tab):
    held, ended = [], []
    tab.route("**/score", lambda route: held.append(route))
    tab.on("requestfailed", lambda request: ended.append(request.url))
    button = tab.locator("#pane-0 [data-score]")
    tab.click("#pane-0 [data-token='6']")
    tab.wait_for_selector("#pane-0 [data-score='6']")
    button.click()
    tab.click("#by input[value=weight]")
    tab.wait_for_selector("#pane-0 >> text=Weights of the reads, mean over the text")
    settled(tab)
    assert button.get_attribute("aria-disabled") == "true" and tab.is_visible("#score-progress")
    button.dispatch_event("click")
    tab.wait_for_timeout(200)
    assert len(held) == 1, "the same once more"
    tab.click("#pane-0 [data-token='7']")
    tab.wait_for_selector("#pane-0 [data-score='7'][aria-disabled=false]")
    button.click()
    until(tab, "document.querySelector('#pane-0 [data-score]').ariaDisabled === 'true'")
    for _ in range(100):
        if len(held) == 2 and ended:
            break
        tab.wait_for_timeout(50)
    assert len(held) == 2 and len(ended) == 1, "another ends it"
    held[1].continue_()
    tab.wait_for_selector("#pane-0 .scores [data-read='6']")
    assert tab.is_hidden("#score-progress") and "(token 7)" in tab.inner_text("#pane-0 .scores h3")
    tab.unroute("**/score")
    tab.click("#by input[value=contribution]")


def test_the_search_that_was_asked_for_last_is_shown(tab):
    tab.select_option("#source", value="embedding")
    tab.wait_for_selector("text=Tokens by the contribution of embedding")
    tab.evaluate("document.querySelector('#search').open = true")
    held = []
    tab.route("**/search", lambda route: route.continue_() if held else held.append(route))
    tab.click("[data-search=most]")
    until(tab, "document.querySelector('[data-search=most]').ariaDisabled === 'true'")
    tab.click("[data-search=least]")
    tab.wait_for_selector("#hits >> text=where embedding is least of the read")
    tab.wait_for_timeout(200)
    assert "least of the read" in tab.inner_text("#hits") and tab.is_hidden("#search-progress")
    assert tab.inner_html("#said") == ""
    tab.unroute("**/search")
    tab.evaluate("document.querySelector('#search').open = false")


def test_a_search_leads_to_a_text(tab):
    tab.select_option("#source", value="embedding")
    tab.wait_for_selector("text=Tokens by the contribution of embedding")
    tab.click("#search summary")
    tab.click("[data-search=most]")
    tab.wait_for_selector("#hits >> text=where embedding is most of the read")
    token = tab.inner_text("#hits [data-hit='0']")
    tab.click("#hits [data-hit='0']")
    until(tab, "document.querySelector('#pane-0 .text').textContent.startsWith('The quick')")
    assert tab.inner_text("#pane-0 [data-token][aria-pressed=true]") == token.replace("␣", " ").strip() or "␣" in token
    tab.click("[data-example=code]")
    until(tab, "document.querySelector('#pane-0 .text').textContent.startsWith('def')")


@pytest.mark.long
def test_two_texts_and_weights(tab):
    tab.click("#second")
    tab.wait_for_selector("#other textarea")
    tab.fill("#other textarea", "The quick brown fox")
    until(tab, "document.querySelector('#pane-1 .text').textContent === 'The quick brown fox'")
    assert tab.query_selector("#between .difference .cell")
    tab.check("#by input[value=weight]")
    tab.wait_for_selector("#pane-1 >> text=Weights of the reads, mean over the text")
    tab.check("#by input[value=contribution]")
    tab.click("#second")
    tab.wait_for_selector("#pane-1", state="detached")
    tab.select_option("#beside select", index=2)
    tab.wait_for_selector("#pane-1 [data-token]")


def test_what_is_typed_is_one_step_and_what_is_refused_none(tab):
    tab.click("#second")
    tab.wait_for_selector("#other textarea")
    settled(tab)
    steps = tab.evaluate("history.length")
    for letter in "xyz":
        tab.locator("#other textarea").press_sequentially(letter)
        until(tab, "letter => document.querySelector('#pane-1 .text').textContent.includes(letter)", letter)
        settled(tab)
    assert tab.evaluate("history.length") == steps
    tab.evaluate("act('example', 'poem')")
    tab.wait_for_selector("text=There is no such example")
    assert tab.evaluate("history.length") == steps
    tab.evaluate("history.back()")
    until(tab, "document.querySelector('#other').hidden")
    tab.evaluate("history.forward()")
    until(tab, "document.querySelector('#pane-1 .text')?.textContent.includes('z')")
    tab.evaluate("history.back()")
    until(tab, "document.querySelector('#other').hidden")
    tab.select_option("#beside select", index=2)
    tab.wait_for_selector("#pane-1 [data-token]")


def test_what_the_guard_refuses_is_said_in_its_words(opened):
    tab, wrong = opened
    settled(tab)
    said = {"text/plain; charset=utf-8": "this is too much at once", "text/html": "<h1>502</h1>"}
    answers = []
    tab.route("**/*", lambda route: route.fulfill(status=413, content_type=answers[0][0], body=answers[0][1]))
    for kind, words in said.items():
        answers[:] = [(kind, words)]
        for action in ("act('undo')", "document.querySelector('[data-search=most]').click()"):
            tab.evaluate("$('#said').replaceChildren()")
            tab.evaluate(action)
            until(tab, "document.querySelector('#said').textContent !== ''")
            expected = words if kind.startswith("text/plain") else "the server did not understand: load the page again"
            assert tab.inner_text("#said") == expected
    tab.unroute("**/*")
    settled(tab)
    assert all("413" in one for one in wrong)
    wrong.clear()


def test_dark_and_light(tab):
    def paper():
        return tab.evaluate("getComputedStyle(document.body).backgroundColor")

    light = paper()
    tab.click("#theme")
    assert paper() != light and tab.get_attribute("#theme", "aria-pressed") == "true"
    tab.click("#theme")
    assert paper() == light


def test_one_model_or_both(tab):
    tab.select_option("#models", index=1)
    tab.select_option("#beside select", index=0)
    tab.wait_for_selector("#pane-1", state="detached")
    settled(tab)
    assert "full" in tab.inner_text("#pane-0 h2")
    left, right = (tab.locator(f"#pane-0 .{name}").bounding_box() for name in ("next", "contributions"))
    assert right["x"] > left["x"] + left["width"] and abs(right["y"] - left["y"]) < 20
    tab.select_option("#beside select", index=1)
    tab.wait_for_selector("#pane-1 [data-token]")
    assert "full" in tab.inner_text("#pane-0 h2") and "block" in tab.inner_text("#pane-1 h2")


def test_typed_code_stays_text(tab):
    tab.click("#text textarea")
    tab.keyboard.press("Control+A")
    tab.keyboard.insert_text(EVIL)
    until(tab, "text => document.querySelector('#pane-0 .text').textContent === text", EVIL)
    assert tab.evaluate("window.hit") is None
    assert tab.query_selector("#panes script, #panes img, #live img") is None
    tab.click("#pane-0 [data-token='4']")
    tab.wait_for_selector("#pane-0 [data-token='4'][aria-pressed=true]")
    tab.reload()
    tab.wait_for_selector("#pane-0 [data-token='4'][aria-pressed=true]")
    assert tab.evaluate("window.hit") is None and tab.input_value("#text textarea") == EVIL


def test_bad_input_is_a_message_and_the_page_goes_on(tab, address):
    tab.fill("#text textarea", "")
    tab.wait_for_selector("text=there is no text")
    tab.fill("#text textarea", "Zq%" * 300)
    tab.wait_for_selector("text=on this page takes")
    tab.fill("#text textarea", "x")
    tab.wait_for_selector("text=One token")
    tab.goto(f"{address}/?v=nonsense")
    tab.wait_for_selector("text=this link is damaged")
    tab.wait_for_selector("#pane-1 [data-token]")
    tab.goto(f"{address}/?e=0.1.1")
    tab.wait_for_selector("text=made by an earlier version")
    tab.goto(f"{address}/?{encode(View(), ['gone~0123456789ab'])}")
    tab.wait_for_selector("text=the model gone (0123456789ab), which is not open here")
    tab.wait_for_selector("#pane-1 [data-token]")


@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_at_every_width_the_effect_and_the_columns_names_stay_in_sight(tab, width):
    tab.set_viewport_size({"width": width, "height": 850})
    settled(tab)
    tab.wait_for_timeout(100)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [tab.query_selector(f"#pane-{i}").bounding_box() for i in range(2)]
    assert (boxes[0]["y"] == boxes[1]["y"]) == (width >= 800)
    assert all(box["width"] > 300 for box in boxes)
    tab.locator("#pane-0 .contributions .grid").evaluate("box => { box.scrollTop = 9999; box.scrollIntoView(false); }")
    tab.locator("#pane-0 .contributions [data-read='6'][data-source='0']").scroll_into_view_if_needed()
    in_sight(tab, "#pane-0 .effect")
    in_sight(tab, "#pane-0 .contributions .names")
    strip, effect = (tab.locator(f"#pane-0 {name}").bounding_box() for name in (".contributions .names", ".effect"))
    assert strip["y"] >= effect["y"] + effect["height"] - 2, "the effect hides the names"


def sent(address, path, body, **headers):
    request = urllib.request.Request(f"{address}/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server_has_its_page_and_four_questions(address):
    assert [sent(address, path, None)[0] for path in ("", "page.js", "page.css")] == [200] * 3
    for path in ("docs", "openapi.json", "page.html", "../../etc/passwd", "%2e%2e/page.py", "file=/etc/passwd"):
        assert sent(address, path, None)[0] == 404
    assert sent(address, "show", None)[0] == 405
    assert sent(address, "show", b"{}", Origin="http://evil.example")[0] == 403
    assert sent(address, "show", b"{}", Host="evil.example")[0] == 421


@pytest.mark.parametrize("path", ["show", "export", "score", "search"])
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[" * 5000, b"[]", b'{"view": 1}', b'{"actions": 1}', b'{"place": -1}']
)
def test_a_question_that_is_none_is_answered_with_a_sentence(address, path, body):
    status, answer = sent(address, path, body)
    last = json.loads(answer.splitlines()[-1])
    assert (status, path in ("score", "search")) in ((400, False), (400, True), (200, True)) and last["error"]
