"""What the page says is what was measured, and nothing that was typed can become part of the page's own code."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnres.app import draw, figures, tokens
from attnres.app.differences import difference
from attnres.app.markup import visible
from attnres.app.pane import Pane, Scales
from attnres.app.reading import Candidate, Effect, Reading
from attnres.app.state import ATTENDED, LARGEST, LOSS, Cut
from attnres.inspect.attention import TokenAttention
from attnres.inspect.attribution import Attribution
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
    parts = [g.dirichlet(np.ones(len(row)), count) for row in SOURCES]
    losses = g.random(count - 1) + 1
    return Reading(tuple(range(count)), list(pieces), list(pieces), LAYOUT, weights, parts, log_probs, losses, [])


def pane(**changes):
    base = Pane(
        number=1,
        place=0,
        title=f"model {EVIL}",
        details=EVIL,
        reading=reading(),
        by="contribution",
        read=2,
        source=LARGEST,
        token=1,
        cuts=(),
        effect=None,
        candidates=[Candidate(EVIL, 0.5, None), Candidate("a", 0.25, None)],
        similarity=(LAYOUT[1:], np.array([[1, -0.4], [-0.4, 1]])),
    )
    return replace(base, **changes)


def edited(**changes):
    r = reading()
    effect = Effect(r.log_probs.roll(1, -1), r.losses + np.array([0.5, -0.2, 0.0]))
    candidates = [Candidate(EVIL, 0.5, 0.1), Candidate("a", 0.25, 0.3)]
    return pane(cuts=(Cut(1, 2, 1),), effect=effect, candidates=candidates, **changes)


def drawn(*panes):
    """HTML of panes on their common scales."""
    scales = Scales.of(panes)
    return "".join(draw.pane(one, scales) for one in panes)


ATTENTION = TokenAttention([0, 1], [0] * 4, *torch.rand(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)))


def parsed(page):
    """The page as a tree: raises if anything in it is left open."""
    return ET.fromstring(page.replace("<br>", "<br/>").replace(' xmlns="http://www.w3.org/2000/svg"', ""))


SCORES = Attribution(
    1, 2, -1.5, True, LAYOUT, *([[-0.5 * (1 + i) for i in range(len(row))] for row in SOURCES] for _ in "ab"), None
)


@pytest.mark.parametrize(
    "example",
    [
        pane(),
        edited(),
        edited(source=LOSS, by="weight"),
        pane(source="embedding", attention=ATTENTION),
        pane(source=ATTENDED, attention=ATTENTION),
        pane(source="mlp 9"),
        pane(cuts=(Cut(1, 2, 1, 3), Cut(1, 2, 0, 9))),
        pane(scores=SCORES),
    ],
)
def test_typed_text_stays_text(example):
    page = drawn(example)
    assert "<script" not in page and "\x00" not in page
    tree = parsed(page)
    assert not [e.tag for e in tree.iter() if e.tag.lower() in ("script", "img", "iframe", "a", "style")]
    assert not [name for e in tree.iter() for name in e.attrib if name.startswith("on")]
    assert '<script>alert("1")</script>' in "".join(tree.itertext())


def test_every_token_and_every_edge_can_be_clicked():
    tree = parsed(drawn(pane()))
    assert [e.get("data-token") for e in tree.iter("span") if e.get("data-token")] == ["0", "1", "2", "3"]
    cells = [e for e in tree.find(".//section[@class='contributions']").iter("rect") if e.get("data-read")]
    assert [(int(e.get("data-read")), int(e.get("data-source"))) for e in cells] == [
        (r, i) for r, row in enumerate(SOURCES) for i in range(len(row))
    ]
    means = [rows[1][:, 1].mean() for rows in (reading().contributions, reading().weights)]
    words = "mlp 0 reads attention 0: contribution {:.3f}, weight {:.3f}".format(*means)
    assert cells[2].get("aria-label") == words


def test_the_tabulator_key_stops_once_a_figure_and_at_the_chosen_token():
    tree = parsed(drawn(pane()))
    stops = [e for e in tree.iter() if e.get("tabindex") == "0"]
    assert [e.get("data-token") or e.get("data-read") for e in stops] == ["1", "0", "0"]
    assert all(e.get("tabindex") == "-1" for e in tree.iter() if e.get("role") == "button" and e not in stops)


@pytest.mark.parametrize("by", ["contribution", "weight"])
def test_bars_of_a_token_are_as_long_as_its_parts(by):
    example = pane(by=by)
    tree = parsed(drawn(example))
    bars = [e for e in tree.find(".//section[@class='stack']").iter("rect") if e.get("data-read") == "2"]
    widths = np.array([float(e.get("width")) + 0.4 for e in bars])
    np.testing.assert_allclose(widths / widths.sum(), example.reading.rows(by)[2][1], atol=1e-3)


def test_a_knock_out_is_crossed_out_and_its_effect_said():
    example = edited()
    page = drawn(example)
    tree = parsed(page)
    assert {
        (e.get("data-read"), e.get("data-source")) for e in tree.iter("rect") if "gone" in (e.get("class") or "")
    } == {("2", "1")}
    before, after = example.reading.log_probs[1].double(), example.effect.log_probs[1].double()
    expected = torch.nn.functional.kl_div(after, before, log_target=True, reduction="sum").item()
    assert example.divergence == pytest.approx(expected, rel=1e-6)
    assert f"KL {expected:.3f} nats" in page
    mean = example.reading.loss
    assert f"loss {mean:.3f} → <b>{mean + 0.1:.3f}</b> nats (+0.100) without 1 edge" in page


def test_tokens_are_coloured_by_the_change_of_their_own_loss():
    fills = tokens._fills(edited(source=LOSS), {}, Scales.of([edited(source=LOSS)]))
    assert fills[0] == fills[3] == "#ffffff"  # the first token has no loss, the last one's did not change
    red, blue = (int(fills[1][1:3], 16), int(fills[2][5:7], 16))
    assert red > int(fills[1][5:7], 16) and blue > int(fills[2][1:3], 16)


def test_what_cannot_be_seen_is_shown():
    assert visible("\n\t") == "↵⇥"
    assert visible("  ") == "␣␣" and visible(" a b ") == "␣a b␣" and visible("\n  ") == "↵␣␣"
    assert visible("\x1b\x7f") == "␛␡" and visible("") == "∅"
    assert visible("a\u202e\u200b\xa0b") == r"a\u202e\u200b\u00a0b", "what would turn the line around, or be nothing"
    assert visible("\u05d0") == "\u2068\u05d0\u2069", "numbers beside it stay where they are"


def test_a_text_reads_as_it_is():
    page = drawn(pane(reading=reading(("if a:", "\n    b", "  c\td", "\x1b"))))
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
    example = pane()
    tree, colours = parsed(drawn(example)), colours_by_name(LAYOUT)
    for i, e in enumerate(e for e in tree.iter("span") if e.get("data-token")):
        fill = colours[SOURCES[2][example.reading.contributions[2][i].argmax()]]
        assert e.get("style") == f"background:{fill};color:{ink_on(fill)}"


def words(read, source):
    return "words"


def test_the_last_column_has_room_for_its_name():
    output = make_residual("full", 24, 8).layout()[-1]
    svg = figures.heatmap([output], [np.full(25, 0.04)], "title", words, largest=1.0)
    x = max(float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*rotate', svg))
    assert x + 3 * 5.5 * 0.5 < figures.WIDTH  # three letters at 60 degrees


def test_sources_against_the_read_lie_left_of_the_line():
    reads = [make_residual("full", 2, 8).layout()[1]]
    parts = [np.array([1.5, -0.5])]
    svg = figures.stack(reads, parts, colours_by_name(reads), "title", words, span=(-0.5, 1.5))
    boxes = [(float(x), float(w) + 0.4) for x, w in re.findall(r'x="([\d.]+)" y="4.00" width="([\d.]+)"', svg)]
    zero = float(re.search(r'd="M([\d.]+) 2V', svg)[1])
    assert boxes[0][1] == pytest.approx(3 * boxes[1][1], abs=0.03)
    assert boxes[0][0] == pytest.approx(zero, abs=0.02) == boxes[1][0] + boxes[1][1]


def test_weights_that_do_not_sum_to_one_are_shown_as_shares():
    weights = [np.array([[3.0, -1.0]])]
    example = Reading((0,), ["a"], ["a"], LAYOUT[1:2], weights, weights, torch.zeros(1, 7), np.zeros(0), [])
    assert example.rows("weight")[0].tolist() == [[0.75, 0.25]] and example.rows("contribution") is weights


def test_scales_are_the_same_in_all_panes():
    small, large = edited(source="embedding"), edited(source="embedding", place=1)
    parts = [row.copy() for row in large.reading.contributions]
    parts[2][:, 0] = np.array([0.8, 0.4, -0.3, 0.1])
    effect = Effect(large.effect.log_probs, large.reading.losses + np.array([2.0, 0, 0]))
    chances = [Candidate("a", 0.9, 0.05)]
    large = replace(large, reading=replace(large.reading, contributions=parts), effect=effect, candidates=chances)
    scales = Scales.of([small, large])
    assert scales.loss == pytest.approx(2.0) and scales.part == pytest.approx(0.8) and scales.probability == 0.9
    assert scales.span[0] == pytest.approx(min(row[1].clip(max=0).sum() for row in parts))
    page = drawn(small, large)
    assert (
        page.count("-0.8 <i") == 1 and page.count(" 0.8 contribution; mean") == 2
    )  # negative ones need the other half
    bars = re.findall(r'<i style="width:([\d.]+)%', page)
    assert "100.0" in bars and f"{100 * 0.5 / 0.9:.1f}" in bars


def test_cells_of_one_number_have_one_colour_in_all_panes():
    """Contributions of more than one, too, which others below zero make up for."""

    def cells(first, second):
        parts = [np.full_like(row, 0.1) for row in reading().contributions]
        parts[2][:] = np.array([first, second, 1 - first - second])
        return pane(reading=replace(reading(), contributions=parts))

    tree = parsed("<div>" + drawn(cells(2.5, 1.0), replace(cells(1.0, -0.5), place=1)) + "</div>")
    fills = [
        [e.get("fill") for e in part.iter("rect") if e.get("data-read") == "2"]
        for part in tree.iterfind(".//section[@class='contributions']")
    ]
    ones = signed_colour(0.4**0.5)  # over the root, of a scale that ends at 2.5
    assert fills[0][:2] == [signed_colour(1.0), ones] and fills[1][0] == ones != signed_colour(1.0)
    assert Scales.of([pane()]).mean == 1.0


def test_what_changes_nothing_stays_pale():
    none = Effect(reading().log_probs, reading().losses + 1e-5)
    example = pane(cuts=(Cut(1, 2, 1),), effect=none, source=LOSS)
    assert Scales.of([example]).loss == 0.02
    for fill in tokens._fills(example, {}, Scales.of([example])):
        assert all(int(fill[i : i + 2], 16) > 248 for i in (1, 3, 5))
    assert (
        "#d55e00"
        not in drawn(replace(example, candidates=[Candidate("a", 0.02841, 0.02839)])).split("<table>")[1][:300]
    )


def test_buttons_have_names_of_their_own():
    tree = parsed("<div>" + drawn(edited(attention=ATTENTION), pane(place=1, title="b")) + "</div>")
    names = [e.get("aria-label") for e in tree.iter("button")]
    assert all(names) and len(set(names)) == len(names) > 8
    states = {e.get("aria-pressed") for e in tree.iter() if e.get("role") == "button"}
    assert states == {"true", "false"}


def test_scored_edges_are_cells_of_their_change():
    tree = parsed(drawn(pane(scores=SCORES)))
    cells = [e for e in tree.find(".//section[@class='scores']").iter("rect") if e.get("data-read")]
    assert cells[-1].get("aria-label") == "output reads mlp 0: ln p −1.500 without it"
    assert cells[-1].get("fill") == signed_colour(-1.0) and cells[0].get("fill") == signed_colour(-((1 / 3) ** 0.5))


def test_a_difference_is_the_second_less_the_first():
    first, second = pane(), pane(place=1, reading=replace(reading(), contributions=[p[::-1] + 0.25 for p in PARTS]))
    tree = parsed(difference(first, second))
    cells = [e.get("data-tip") for e in tree.iter("rect") if e.get("data-tip")]
    assert cells[0] == "attention 0 reads embedding: contribution +0.250" and len(cells) == sum(map(len, SOURCES))
    assert not [e for e in tree.iter() if e.get("data-read")]
    other = make_residual("standard", 2, 8).layout()[:1]
    foreign = replace(reading(), layout=(other[0]._replace(kind="state"),), contributions=PARTS[:1])
    assert "no read and source in common" in difference(first, pane(reading=foreign))


def test_blocks_of_other_outputs_have_no_difference():
    """Of blocks of two outputs and of one, the latter's numbers go up twice as fast."""

    def blocks(size):
        layout = make_residual("block", 4, 8, block_size=size).layout()
        parts = [np.full((4, len(read.sources)), 0.25) for read in layout]
        return pane(reading=replace(reading(), layout=layout, weights=parts, contributions=parts))

    tree = parsed(difference(blocks(2), blocks(1)))
    edges = [e.get("data-tip").split(":")[0] for e in tree.iter("rect") if e.get("data-tip")]
    reads = ("attention 0", "mlp 0", "attention 1", "mlp 1", "output")
    assert edges == [f"{read} reads embedding" for read in reads]
    wider = parsed(difference(blocks(2), blocks(2)))
    assert len([e for e in wider.iter("rect") if e.get("data-tip")]) == 1 + 2 + 2 + 3 + 3


PARTS = reading().contributions
