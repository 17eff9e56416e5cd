"""The explorer in a real browser: headless Chromium types, clicks, compares, saves and restores."""

import json
import os
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
    page.wait_for_selector(".depth")
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
    return download.value.suggested_filename, download.value.path().read_text()


def settled(page):
    """Wait until no answer is under way, and all edges are scored."""
    until(page, "shown && !busy && !again && shown.panes.every((one) => one.error || one.scores && one.scores.done)")


def until(page, script, arg=None):
    """Wait until a script's value is true; the page's policy forbids Playwright's own way, which is eval."""
    last = time.monotonic() + 60
    while not page.evaluate(script, arg):
        assert time.monotonic() < last, script
        time.sleep(0.05)


def alone(page):
    """Show the first model without cuts on a short text."""
    page.evaluate(
        "change({text: 'def read(rows):\\n    return rows\\n', models: [0], token: 3, cuts: [], target: null,"
        " against: null, tab: 'explain', span: 'all', edited: true, by: 'contribution'})"
    )
    settled(page)


def test_the_answer_comes_by_itself_and_a_cut_is_one_click(tab):
    """Sentence, ranks and tables are there without a click; a cut changes them, a link keeps it, Back undoes it."""
    alone(tab)
    say = tab.inner_text(".say")
    edges = tab.evaluate("shown.panes[0].scores.edges")
    assert say.startswith("The prediction of “") and f"{edges} edges, each cut alone and measured" in tab.inner_text(
        "#answer"
    )
    values = tab.evaluate("ranked(shown.panes[0]).map((one) => Math.abs(one.value))")
    assert values == sorted(values, reverse=True) and len(values) == edges
    assert len(tab.query_selector_all(".depth tbody tr")) == 7
    assert tab.get_attribute(".text [aria-pressed=true]", "data-t") == "3"

    draws, asks = tab.evaluate("[counted.draws, counted.asks]")
    tab.click(".rank tr >> nth=0")
    tab.wait_for_selector("#tray .chip")
    settled(tab)
    assert tab.evaluate("counted.asks") == asks + 1, "one question a click"
    assert tab.evaluate("counted.draws") <= draws + 2 + edges, "one drawing an answer and a batch of scores"
    assert (
        "→" in tab.inner_text(".next")
        and "text loss" in tab.inner_text("#tray")
        and "with your cuts" in tab.inner_text(".sub")
    )
    assert tab.locator(".cut-mark").count() >= 1

    other = tab.context.new_page()
    other.goto(tab.url)
    other.wait_for_selector("#tray .chip")
    settled(other)
    for part in (".say", ".rank", ".next", "#tray"):
        assert other.inner_text(part) == tab.inner_text(part)
    other.close()
    tab.evaluate("history.back()")
    until(tab, "!document.querySelector('#tray .chip')")
    settled(tab)
    assert tab.inner_text(".say") == say


def test_a_saved_page_needs_no_server(tab, tmp_path):
    alone(tab)
    name, text = saved(tab, "#save")
    (tmp_path / name).write_text(text)
    context = tab.context.browser.new_context(offline=True)
    wrong = []
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    page = context.new_page()
    page.goto((tmp_path / name).as_uri())
    page.wait_for_selector(".depth")
    for part in (".say", ".rank", "#text"):
        assert page.inner_text(part) == tab.inner_text(part)
    assert not page.is_visible("#tray") and not page.is_visible("#model") and wrong == []
    context.close()
    name, text = saved(tab, "#csv")
    lines = text.splitlines()
    assert name == "attnres-explain.csv" and lines[0].startswith("layer,source,contribution") and len(lines) == 20
    name, text = saved(tab, "#svg")
    assert name == "attnres-explain.svg" and "L2 MLP" in "".join(ET.fromstring(text).itertext())
    tab.click("#code")
    assert "attribute(model, text, position=3" in tab.inner_text("#codes pre")
    tab.click("#codes button")


@pytest.mark.long
def test_a_target_a_comparison_and_a_tab_are_chosen(tab):
    alone(tab)
    second = tab.get_attribute(".next tr >> nth=1", "data-target")
    tab.click(".next tr >> nth=1")
    until(tab, "(id) => shown.panes[0].target === +id", second)
    settled(tab)
    tab.select_option("[data-against]", index=1)
    until(tab, "shown.panes[0].against !== null")
    settled(tab)
    assert "rather than" in tab.inner_text(".say")
    tab.select_option("#beside", index=1)
    until(tab, "shown.panes.length === 2")
    settled(tab)
    assert "B minus A" in tab.inner_text("#answer") and tab.locator(".heat").count() == 3
    tab.click("[data-compared]")
    assert "estimated by gradient" in tab.inner_text("#answer") and tab.locator(".heat").count() == 3
    tab.click("[data-compared]")
    tab.click("[role=tab][data-tab=training]")
    tab.wait_for_selector("text=How sharply layers choose")
    tab.click("[role=tab][data-tab=search]")
    tab.click("[data-search=most]")
    tab.click("[data-hit='0']")
    until(tab, "view.tab === 'explain' && shown.view.text.startsWith('The')")
    settled(tab)


def test_scores_of_another_prediction_end_before_the_next_answer(tab):
    """Another token ends them at once, a layer that is opened does not."""
    alone(tab)
    start = "const control = new AbortController(); scoring = {of: '', asked: predicted(), control};"
    for change, ends in (("layer: 1", False), ("layer: null", False), ("token: 2", True)):
        act = f"() => {{ {start} change({{{change}}}); scoring = null; return control.signal.aborted; }}"
        assert tab.evaluate(act) is ends
        settled(tab)


def test_an_earlier_step_stands_left_and_goes_again(tab):
    """The two models are taken for steps of one training."""
    alone(tab)
    tab.evaluate("window.own = structuredClone(begin.choices)")
    tab.evaluate("[9, 3].forEach((step, i) => Object.assign(begin.choices[i], {step, run: 0}))")
    tab.select_option("#beside", "1")
    until(tab, "String(view.models) === '1,0'")
    settled(tab)
    tab.select_option("#beside", "")
    until(tab, "String(view.models) === '0'")
    tab.evaluate("begin.choices.splice(0, 2, ...window.own)")
    settled(tab)


@pytest.mark.long
def test_a_text_is_patched_from_another(tab):
    alone(tab)
    tab.click("[role=tab][data-tab=patch]")
    tab.wait_for_selector("#other")
    tab.fill("#other", "")
    tab.click("[data-patch]")
    tab.wait_for_selector("#said:has-text('no text')")
    tab.fill("#other", "def write(rows):\n    return read\n")
    tab.click("[data-patch]")
    until(tab, "!document.body.dataset.working && patched")
    assert "Taking" in tab.inner_text("#answer") and "partner" in tab.inner_text("#answer .sub")
    tab.click("#code")
    assert "patch(model, other, text, position=3" in tab.inner_text("#codes pre")
    tab.click("#codes button")


@pytest.mark.long
def test_one_layer_is_opened_and_a_graph_is_pruned_and_saved(tab, tmp_path):
    """Counted in what the page draws, against the numbers that it was sent; a saved page has both."""
    alone(tab)
    tab.click("[data-layer='2']")
    until(tab, "shown.panes[0].over !== null")
    settled(tab)
    sources = tab.evaluate("shown.panes[0].reads[2].sources.length")
    assert tab.locator(".sheet .heat >> nth=0 >> tbody tr").count() == sources
    assert "What each head of L1 attention attends to" in tab.inner_text("#answer")
    tab.click("[data-graph]")
    until(tab, "!document.body.dataset.working && graphed && document.querySelector('#graph')")
    for place in ("0", "1", "0.5"):
        tab.evaluate(
            "(at) => { const one = document.querySelector('#threshold'); one.value = at;"
            " one.dispatchEvent(new Event('input', {bubbles: true})); }",
            place,
        )
        counts = tab.evaluate(
            "(() => { const most = Math.max(...graphed.result.links.map((one) => Math.abs(one[4]))),"
            " {nodes, links} = pruned(graphed.result, most * graphed.at ** 2);"
            " return [nodes.length, links.length]; })()"
        )
        assert [tab.locator("#graph circle").count(), tab.locator("#graph path").count()] == counts
        assert tab.evaluate("document.activeElement.id") in ("threshold", "")
    name, text = saved(tab, "[data-csv=graph]")
    assert name == "attnres-graph.csv" and len(text.splitlines()) == 1 + tab.evaluate("graphed.result.links.length")
    name, text = saved(tab, "[data-csv=over]")
    assert len(text.splitlines()) > tab.evaluate("shown.panes[0].tokens.length") * sources
    name, text = saved(tab, "#svg")
    drawn = ET.fromstring(text).iter("{http://www.w3.org/2000/svg}path")
    assert len(list(drawn)) == counts[1] and "var(" not in text
    name, text = saved(tab, "[data-neuronpedia]")
    stored = json.loads(text)
    assert name == "attnres-graph.json" and len(stored["links"]) == counts[1]
    assert {node["node_id"] for node in stored["nodes"]} >= {link["source"] for link in stored["links"]}
    name, text = saved(tab, "#save")
    (tmp_path / name).write_text(text)
    context = tab.context.browser.new_context(offline=True)
    page = context.new_page()
    page.goto((tmp_path / name).as_uri())
    page.wait_for_selector("#graph circle")
    assert page.locator("#graph path").count() == counts[1] and page.locator(".sheet .heat").count() == 2
    context.close()
    tab.click("[data-layer='2']")
    until(tab, "shown.panes[0].over === null")


@pytest.mark.long
def test_keys_do_what_clicks_do(tab):
    alone(tab)
    at = "document.activeElement.dataset.t ?? document.activeElement.dataset.e"
    tab.focus(".text [aria-pressed=true]")
    for key, place in [("ArrowRight", "4"), ("Home", "0"), ("ArrowRight", "1")]:
        tab.keyboard.press(key)
        assert tab.evaluate(at) == place
    tab.keyboard.press("Enter")
    until(tab, "shown.panes[0].token === 1")
    settled(tab)
    assert tab.evaluate(at) == "1"
    tab.focus(".depth .cell[data-e='1,0']")
    for key, place in [("ArrowRight", "1,1"), ("End", "6,3"), ("Home", "0,0"), ("ArrowDown", "1,0")]:
        tab.keyboard.press(key)
        assert tab.evaluate(at) == place
    assert tab.inner_text("#tip").startswith("L0 MLP ← embedding: contribution")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#tray .chip")
    settled(tab)
    assert tab.evaluate(at) == "1,0"
    unnamed = "(one) => !one.textContent.trim() && !one.ariaLabel && !one.labels?.length"
    assert tab.evaluate(f"[...document.querySelectorAll('button,select,input')].filter({unnamed}).length") == 0


@pytest.mark.long
def test_no_click_is_lost_while_it_answers(tab):
    """Clicks 20 ms apart, by the page's own clock, on a server that needs longer than that."""
    alone(tab)
    tab.evaluate(
        """async () => { for (const edge of ["1,0", "2,1", "3,1", "4,1", "5,2", "6,1"]) {
          const cell = document.querySelector(`.depth .cell[data-e='${edge}']`);
          cell.dispatchEvent(new MouseEvent("click", {bubbles: true}));
          await new Promise((done) => setTimeout(done, 20));
        } }"""
    )
    settled(tab)
    assert tab.locator("#tray .chip").count() == 6
    for count in (5, 4):
        tab.click("[data-undo=last]")
        until(tab, "(count) => document.querySelectorAll('#tray .chip').length === count", count)
    tab.click("[data-undo=all]")
    until(tab, "!document.querySelector('#tray .chip')")


@pytest.mark.long
@pytest.mark.parametrize(("width", "height"), [(400, 860), (1280, 860), (1440, 900)])
@pytest.mark.parametrize("dark", [False, True])
def test_the_answer_is_on_the_first_screen(tab, width, height, dark):
    alone(tab)
    tab.evaluate("(dark) => setTheme(dark)", dark)
    tab.set_viewport_size({"width": width, "height": height})
    tab.evaluate("scrollTo(0, 0)")
    parts = [".say", ".depth tbody tr >> nth=0"] + ([".rank tr >> nth=0", ".next tr >> nth=0"] if width > 1200 else [])
    for part in parts:
        box = tab.locator(part).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= height, part
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.evaluate("setTheme(false)")


@pytest.mark.long
def test_typed_code_stays_text(tab):
    alone(tab)
    tab.click("#edit")
    tab.fill("#editor", EVIL)
    until(tab, "(text) => shown.view.text === text", EVIL)
    settled(tab)
    tab.keyboard.press("Escape")
    assert tab.evaluate("window.hit") is None and "<script>" in tab.inner_text("#text").replace("\n", "")
    tab.evaluate("change({text: ''})")
    tab.wait_for_selector(".error")
    assert "there is no text" in tab.inner_text("#answer")
    alone(tab)


@pytest.mark.long
@pytest.mark.parametrize("path", ["show", "patch", "score", "search", "circuit", "neuronpedia"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"view": 1}', b'{"view": {}, "place": -1}', b"\xff"])
def test_a_question_that_is_none_is_answered_with_a_sentence(address, path, body):
    request = urllib.request.Request(f"{address}/{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            said = json.loads(answer.read().splitlines()[-1])
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == 400
            said = json.loads(error.read())
    assert len(said["error"]) > 10 and "Traceback" not in said["error"]
