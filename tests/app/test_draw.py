"""What the page says is what was measured, and nothing that was typed can become part of the page's own code."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
import torch

from attnres.app import draw, figures
from attnres.app.draw import difference
from attnres.app.figures import visible, without
from attnres.app.pane import Pane, Scales, _fills, export
from attnres.app.reading import Candidate, Effect, Reading
from attnres.app.state import ATTENDED, LARGEST, LOSS, Cut
from attnres.inspect.attention import TokenAttention
from attnres.inspect.attribution import Agreement, Attribution
from attnres.inspect.colours import DIVERGING, colours_by_name, contrast, ink_on, signed_colour
from attnres.residuals import make_residual

EVIL = '<script>alert("1")</script>\x00\u202e\'&'
LAYOUT = make_residual("full", 2, 8).layout()
SOURCES = [[source.name for source in read.sources] for read in LAYOUT]
ALIKE = (LAYOUT[1:3], np.array([[1, -0.4], [-0.4, 1]]))


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
        similarity=ALIKE,
        queries=draw.queries("model", ALIKE),
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
    """And at what can be scrolled."""
    tree = parsed(drawn(pane(attention=ATTENTION)))
    stops = [e for e in tree.iter() if e.get("tabindex") == "0"]
    assert [e.get("class").split()[0] for e in stops] == ["token", "cell", "cell", "grid", "cell", "grid", "cell"]
    assert [e.get("data-token") or e.get("data-read") for e in stops] == ["1", "0", None, None, "0", None, None]
    others = [e for e in tree.iter() if e.get("role") in ("button", "img") and e not in stops]
    assert len(others) > 20 and {e.get("tabindex") for e in others} == {"-1"}


def test_what_is_seen_by_pointing_is_said_to_those_who_do_not_point():
    example = edited(attention=ATTENTION)
    tree = parsed("<div>" + drawn(example) + difference(pane(), pane(place=1)) + "</div>")
    cells = [e for e in tree.iter() if (e.get("class") or "").startswith("cell")]
    by_figure = {e.get("aria-label").split(":")[0].split(" attends")[0] for e in cells}
    assert all(e.get("role") in ("button", "img") for e in cells)
    assert {"mlp 0 and mlp 0", "layer 1", "mlp 0 reads embedding"} <= by_figure
    losses = example.reading.losses, example.effect.losses
    labels = [e.get("aria-label") for e in tree.iter("span") if e.get("data-token")]
    assert "loss" not in labels[0]
    for label, before, after in zip(labels[1:4], *losses, strict=True):
        assert label.endswith(f"loss {before:.2f} → {after:.2f}")


def test_edges_that_do_not_exist_are_hatched():
    svg = figures.heatmap(LAYOUT, [np.zeros(len(row)) for row in SOURCES], "title", words, largest=1.0)
    tree = ET.fromstring(svg.split("</svg>")[1] + "</svg>")
    boxes = [e for e in tree.iter() if e.get("data-read")]
    there = [tuple(float(e.get(name)) for name in ("x", "y", "width", "height")) for e in boxes]
    path = "".join(e.get("d") for e in tree.iter() if e.get("class") == "absent")
    lines = np.array(re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)", path), dtype=float)
    middles = (lines[:, :2] + lines[:, 2:]) / 2
    for x, y, width, height in there:
        inside = (abs(middles - [x + width / 2, y + height / 2]) < [width / 2, height / 2]).all(1)
        assert not inside.any()
    width, rows = there[1][2] + 0.6, sorted({box[1] for box in there})
    for r, y in enumerate(rows):
        left = figures.LABEL + len(SOURCES[r]) * width
        in_row = middles[(middles[:, 1] > y) & (middles[:, 1] < y + there[0][3] + 0.6)]
        assert (in_row[:, 0] > left - 0.1).all() and len(in_row) >= 2 * (len(SOURCES[-1]) - len(SOURCES[r]))


@pytest.mark.parametrize("count", [4, 512])
def test_attention_of_all_tokens_alike_is_drawn_and_what_is_not_is_said(count):
    even = TokenAttention([0], [0] * count, *torch.full((2, 1, count, count), 1 / count))
    pieces = ("a",) * count
    tree = parsed(drawn(pane(reading=reading(pieces), attention=even, token=count - 1)))
    part = tree.find(".//section[@class='attended']")
    drawn_tokens = [e for e in part.iter("rect") if e.get("aria-label")]
    assert len(drawn_tokens) == 2 * count
    said = float(re.search(r"what is below ([\d.]+) is not drawn", part.find("p").text)[1])
    assert said == pytest.approx(min(0.01, 0.5 / count), rel=0.01)


def test_cells_of_a_deep_network_are_wide_enough_to_hit():
    layout = make_residual("full", 200, 8).layout()
    svg = figures.heatmap(layout[-1:], [np.zeros(201)], "title", words, largest=1.0)
    widths = [float(width) for width in re.findall(r'class="cell edge" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg)]
    assert len(widths) == 201 and min(widths) > 3
    whole = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])
    assert whole > 201 * min(widths) and f"--wide:{whole / figures.WIDTH:.4f}" in svg
    assert "--wide" not in figures.heatmap(LAYOUT, [np.zeros(len(row)) for row in SOURCES], "t", words, largest=1.0)


@pytest.mark.parametrize("largest", [0.02, 0.0237, 1.0, 2.94, 123.4])
def test_the_numbers_of_a_scale_are_apart(largest):
    svg = figures.heatmap(LAYOUT[:1], [np.zeros(1)], "title", words, largest=largest)
    scale = svg[svg.rindex("<rect") :]
    texts = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)" >([^<]+)<', scale)
    starts = {"start": 0.0, "middle": 0.5, "end": 1.0}
    wide = [(float(x) - starts[anchor] * 5.2 * len(said), 5.2 * len(said)) for x, anchor, said in texts]
    assert len(texts) == 6 and texts[0][2].startswith("−")
    assert all(x + width < following for (x, width), (following, _) in itertools.pairwise(wide))


def test_what_is_no_number_is_a_dash_and_spoils_no_scale():
    broken = [row.copy() for row in PARTS]
    for row in broken:
        row[1] = np.nan
    losses = np.array([np.nan, 1.5, 2.0])
    bad = replace(reading(), contributions=broken, weights=broken, losses=losses)
    effect = Effect(bad.log_probs * np.nan, losses + 0.5)
    unknown = [[np.nan] * len(row) for row in SOURCES]
    scores = replace(SCORES, log_probability=np.nan, knockout=unknown, agreement=Agreement(1, None, 0.0, 1))
    cosines = (LAYOUT[1:3], np.full((2, 2), np.nan))
    example = pane(
        reading=bad,
        cuts=(Cut(1, 2, 1),),
        effect=effect,
        candidates=[Candidate("a", np.nan, np.nan)],
        scores=scores,
        target="b",
        queries=draw.queries("model", cosines),
    )
    page = drawn(example, edited(place=1))
    assert "nan" not in page.lower()
    assert "contribution –, weight –" in page and "KL – nats" in page and "ln p – without it" in page
    assert "loss – →" in page and "mlp 0 and mlp 0: cosine –" in page
    grey = [e for e in parsed(f"<div>{page}</div>").iter("rect") if (e.get("aria-label") or "").endswith("cosine –")]
    assert {e.get("fill") for e in grey}.isdisjoint(signed_colour(value) for value in (-1.0, 0.0, 1.0))
    assert Scales.of([example]).loss == pytest.approx(0.5)
    assert json.loads(json.dumps(export([example]), allow_nan=False))["models"][0]["losses"] == [None, 1.5, 2.0]


def test_a_deeper_network_is_drawn_edge_by_edge(monkeypatch):
    """The names of all edges, made for each, would be their number squared."""
    asked, names = [], Reading.sources
    monkeypatch.setattr(Reading, "sources", property(lambda self: asked.append(self) or names.fget(self)))

    def count(layers):
        layout = make_residual("full", layers, 8).layout()
        parts = [np.full((4, len(read.sources)), 0.5) for read in layout]
        asked.clear()
        drawn(pane(reading=replace(reading(), layout=layout, weights=parts, contributions=parts)))
        return len(asked)

    assert count(2) == count(9)


def test_names_that_are_cut_short_are_whole_where_they_are_pointed_at():
    long = "a name that no column has room for" * 3
    example = replace(edited(), candidates=[Candidate(long, 0.5, 0.1)])
    tree = parsed(drawn(example))
    assert [e.get("data-tip") for e in tree.iter("th")] == [long]
    assert long in tree.find(".//span[@class='words']").get("data-tip")
    assert "KL" in tree.find(".//span[@class='divergence']").text
    line = tree.find(".//section[@class='next']/p")
    assert line.get("data-tip") == line.text and "goes on with" in line.text


def test_scores_name_the_token_that_they_are_of():
    after_last = drawn(pane(token=3, scores=SCORES, target=" likely"))
    assert "Change of ln p of “␣likely”, the likeliest next token, (−1.500)" in after_last
    assert "Change of ln p of “↵” (−1.500)" in drawn(pane(scores=SCORES, target="other"))


def test_a_part_that_the_browser_has_is_sent_without_what_is_in_it():
    first, second = drawn(pane()), drawn(pane(token=2))
    known = {e.get("data-hash") for e in parsed(first).iter("section")}
    left = parsed(without(second, known))
    empty = {e.get("class") for e in left.iter("section") if not len(e)}
    assert empty == {"contributions", "queries"} and len(known) == len(list(parsed(first).iter("section")))
    assert {e.get("class") for e in left.iter("section")} == {e.get("class") for e in parsed(second).iter("section")}
    assert without(second, set()) == second


@pytest.mark.parametrize("by", ["contribution", "weight"])
def test_bars_of_a_token_are_as_long_as_its_parts(by):
    example = pane(by=by)
    tree = parsed(drawn(example))
    bars = [e for e in tree.find(".//section[@class='stack']").iter("rect") if e.get("data-read") == "2"]
    assert len(bars) == len(SOURCES[2])
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
    fills = _fills(edited(source=LOSS), {}, Scales.of([edited(source=LOSS)]))
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


def test_a_segment_too_narrow_to_hit_is_no_button():
    reads = [make_residual("full", 2, 8).layout()[1]]
    svg = figures.stack(reads, [np.array([0.999, 0.001])], colours_by_name(reads), "title", words, out={(0, 1)})
    assert re.findall(r'data-source="(\d)" role="button"', svg) == ["0"]
    assert svg.count('aria-label="words"') == 2 and f'stroke="{figures.LESS}"' in svg


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
        page.count("−0.8 <i") == 1 and page.count(" 0.8 contribution; mean") == 2
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
    for fill in _fills(example, {}, Scales.of([example])):
        assert all(int(fill[i : i + 2], 16) > 248 for i in (1, 3, 5))
    assert (
        "#d55e00"
        not in drawn(replace(example, candidates=[Candidate("a", 0.02841, 0.02839)])).split("<table>")[1][:300]
    )


def test_buttons_have_names_of_their_own():
    tree = parsed("<div>" + drawn(edited(attention=ATTENTION), pane(place=1, title="b", queries="")) + "</div>")
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
    cells = [e.get("aria-label") for e in tree.iter("rect") if e.get("aria-label")]
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
    edges = [e.get("aria-label").split(":")[0] for e in tree.iter("rect") if e.get("aria-label")]
    reads = ("attention 0", "mlp 0", "attention 1", "mlp 1", "output")
    assert edges == [f"{read} reads embedding" for read in reads]
    wider = parsed(difference(blocks(2), blocks(2)))
    assert len([e for e in wider.iter("rect") if e.get("aria-label")]) == 1 + 2 + 2 + 3 + 3


PARTS = reading().contributions


def test_a_separator_of_tokens_has_the_colour_behind_them_in_both_themes():
    """One of a fixed colour, with a token's round corners, looks like a bracket on the other theme's paper."""
    style = (files("attnres.app") / "page.css").read_text()
    (behind,) = re.findall(r"\.text \{ background: (var\(--\w+\));", style)
    (separator,) = re.findall(r"\.token \{[^}]*box-shadow: inset -1px 0 ([^;]+);", style)
    assert separator == behind and style.count(f"{behind[4:-1]}: #") == 2
