"""What the page says is what was measured, and nothing that was typed can become part of the page's own code."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnres.app import figures
from attnres.app import view as html
from attnres.app.explorer import Candidate, Effect, Reading
from attnres.app.state import LOSS
from attnres.inspect.colours import DIVERGING, colours_by_name, contrast, ink_on, signed_colour
from attnres.residuals import make_residual

EVIL = '<script>alert("1")</script>\x00\u202e\'&'
LAYOUT = make_residual("full", 2, 8).layout()
SOURCES = [[source.name for source in read.sources] for read in LAYOUT]


def reading(pieces=("def", " x", "\n", EVIL)):
    g = np.random.default_rng(0)
    count = len(pieces)
    weights = [g.dirichlet(np.ones(len(row)), count) for row in SOURCES]
    log_probs = torch.randn(count, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    return Reading(tuple(range(count)), list(pieces), LAYOUT, weights, weights, log_probs, g.random(count - 1) + 1, [])


def pane(**changes):
    base = html.Pane(
        number=1,
        title=f"model {EVIL}",
        details=EVIL,
        reading=reading(),
        read=2,
        source="heaviest",
        token=1,
        edges=frozenset(),
        effect=None,
        candidates=[Candidate(EVIL, 0.5, None), Candidate("a", 0.25, None)],
        similarity=(LAYOUT[1:], np.array([[1, -0.4], [-0.4, 1]])),
    )
    return replace(base, **changes)


def edited(**changes):
    r = reading()
    effect = Effect(r.log_probs.roll(1, -1), r.losses + np.array([0.5, -0.2, 0.0]))
    candidates = [Candidate(EVIL, 0.5, 0.1), Candidate("a", 0.25, 0.3)]
    return pane(edges=frozenset({(2, 1)}), effect=effect, candidates=candidates, **changes)


def parsed(page):
    """The page as a tree: raises if anything in it is left open."""
    return ET.fromstring(page.replace("<br>", "<br/>").replace(' xmlns="http://www.w3.org/2000/svg"', ""))


@pytest.mark.parametrize(
    "made", [pane(), edited(), edited(source=LOSS), pane(source="embedding"), pane(source="mlp 9")]
)
def test_typed_text_stays_text(made):
    page = html.pane(made)
    assert "<script" not in page and "\x00" not in page
    tree = parsed(page)
    assert not [e.tag for e in tree.iter() if e.tag.lower() in ("script", "img", "iframe", "a", "style")]
    assert not [name for e in tree.iter() for name in e.attrib if name.startswith("on")]
    assert '<script>alert("1")</script>' in "".join(tree.itertext())


def test_every_token_and_every_edge_can_be_clicked():
    tree = parsed(html.pane(pane()))
    assert [e.get("data-token") for e in tree.iter("span") if e.get("data-token")] == ["0", "1", "2", "3"]
    cells = [e for e in tree.find(".//section[@class='contributions']").iter("rect") if e.get("data-read")]
    assert [(int(e.get("data-read")), int(e.get("data-source"))) for e in cells] == [
        (r, i) for r, row in enumerate(SOURCES) for i in range(len(row))
    ]
    assert cells[2].get("aria-label") == "mlp 0 reads attention 0: contribution {0:.3f}, weight {0:.3f}".format(
        reading().means[1][1]
    )


def test_the_tabulator_key_stops_once_a_figure_and_at_the_chosen_token():
    tree = parsed(html.pane(pane()))
    stops = [e for e in tree.iter() if e.get("tabindex") == "0"]
    assert [e.get("data-token") or e.get("data-read") for e in stops] == ["1", "0", "0"]
    assert all(e.get("tabindex") == "-1" for e in tree.iter() if e.get("role") == "button" and e not in stops)


def test_bars_of_a_token_are_as_long_as_its_weights():
    made = pane()
    tree = parsed(html.pane(made))
    bars = [e for e in tree.find(".//section[@class='stack']").iter("rect") if e.get("data-read") == "2"]
    widths = np.array([float(e.get("width")) + 0.4 for e in bars])
    np.testing.assert_allclose(widths / widths.sum(), made.reading.weights[2][1], atol=1e-3)


def test_a_knock_out_is_crossed_out_and_its_effect_said():
    made = edited()
    page = html.pane(made)
    tree = parsed(page)
    assert {
        (e.get("data-read"), e.get("data-source")) for e in tree.iter("rect") if "gone" in (e.get("class") or "")
    } == {("2", "1")}
    before, after = made.reading.log_probs[1].double(), made.effect.log_probs[1].double()
    expected = torch.nn.functional.kl_div(after, before, log_target=True, reduction="sum").item()
    assert html.kl_divergence(made) == pytest.approx(expected, rel=1e-6)
    assert f"KL {expected:.3f} nats" in page
    mean = made.reading.loss
    assert f"loss {mean:.3f} → <b>{mean + 0.1:.3f}</b> nats (+0.100) without 1 edge" in page


def test_tokens_are_coloured_by_the_change_of_their_own_loss():
    fills = html._fills(edited(source=LOSS), {})
    assert fills[0] == fills[3] == "#ffffff"  # the first token has no loss, the last one's did not change
    red, blue = (int(fills[1][1:3], 16), int(fills[2][5:7], 16))
    assert red > int(fills[1][5:7], 16) and blue > int(fills[2][1:3], 16)


def test_what_cannot_be_seen_is_shown():
    assert html.visible("\n\t") == "↵⇥"
    assert html.visible("  ") == "␣␣" and html.visible(" a b ") == "␣a b␣" and html.visible("\n  ") == "↵␣␣"
    assert html.visible("\x1b\x7f") == "␛␡" and html.visible("") == "∅"


def test_a_text_reads_as_it_is():
    page = html.pane(pane(reading=reading(("if a:", "\n    b", "  c\td", "\x1b"))))
    text = parsed(page).find(".//div[@class='text']")
    assert "".join(text.itertext()) == "if a:↵\n    b  c⇥d␛"


def test_colours_are_apart_and_even():
    colours = colours_by_name(make_residual("full", 24, 8).layout())
    assert len(set(colours.values())) == 25
    assert (
        signed_colour(-3.0) == DIVERGING[0] and signed_colour(0.0) == DIVERGING[3] and signed_colour(1) == DIVERGING[6]
    )
    assert all(re.fullmatch("#[0-9a-f]{6}", signed_colour(value)) for value in (-0.5, 0.2, 0.9999))
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") == pytest.approx(
        4.48, abs=0.01
    )
    assert all(contrast(ink_on(colour), colour) >= 4.5 for colour in colours.values())


def test_tokens_have_the_colours_of_the_bars():
    made = pane()
    tree, colours = parsed(html.pane(made)), colours_by_name(LAYOUT)
    for i, e in enumerate(e for e in tree.iter("span") if e.get("data-token")):
        fill = colours[SOURCES[2][made.reading.weights[2][i].argmax()]]
        assert e.get("style") == f"background:{fill};color:{ink_on(fill)}"


def test_the_last_column_has_room_for_its_name():
    output = make_residual("full", 24, 8).layout()[-1]
    svg = figures.heatmap([output], [np.full(25, 0.04)], [np.full(25, 0.04)], frozenset(), "title")
    x = max(float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*rotate', svg))
    assert x + 3 * 5.5 * 0.5 < figures.WIDTH  # three letters at 60 degrees


def test_weights_that_do_not_sum_to_one_still_make_bars_of_one_length():
    reads = [make_residual("full", 2, 8).layout()[1]]
    svg = figures.stack(reads, [np.array([3.0, -1.0])], colours_by_name(reads), frozenset(), "title")
    widths = [float(x) for x in re.findall(r'width="([\d.]+)" height="11', svg)]
    assert widths[0] / sum(widths) == pytest.approx(0.75, abs=1e-3)
