"""Figures of an inspection: every value stands where its name says, at any depth; what does not apply is left out."""

import copy
import dataclasses
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from invented import TOKENS, inspection, names, of_several_reads
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnres.errors import UserError
from attnres.figures import (
    Comparison,
    NotShown,
    Variant,
    draw_comparison,
    draw_model,
    save_all,
    style,
    write_figures,
)
from attnres.figures.cells import cells as draw_cells
from attnres.figures.cells import look_of, scale
from attnres.figures.comparison import LossDifference, final_difference, held_out_loss
from attnres.figures.comparison import difference as loss_difference
from attnres.figures.depth import CHOICE, by_depth, dynamics, over_steps
from attnres.figures.geometry import learned
from attnres.figures.patterns import (
    at_boundaries,
    boundaries,
    by_kind,
    label_sources,
    layer_shares,
    mixing,
    patterns,
    shares,
)
from attnres.figures.plot import canvas, from_zero, log_numbers, panels, thin_ticks
from attnres.figures.style import to_svg
from attnres.figures.tokens import _layout, drawable, stacked, token_map
from attnres.inspect.inspection import FIELD
from attnres.residuals import RESIDUALS, traits_of
from attnres.residuals.mechanisms.muddformer import WAYS
from attnres.stats import Effect, t_quantile

PAGE = style.Sheet().page
ALONE = [
    *("patterns", "boundaries", "layers", "kinds", "kinds-sources", "queries", "keys", "learned"),
    *("tokens", "token-map"),
]
BESIDE = ["mixing", "depth", "magnitudes", "source-norms"]


def variant(label, residual, *more, **fields):
    return Variant(label, residual, traits_of(residual), *more, **fields)


def models(*inspections):
    return Comparison.of_models(inspections)


def differs(place, mean, margin, basis="windows", level=0.05):
    """A difference whose interval at 95 % has that margin."""
    return LossDifference(place, Effect(mean, margin / t_quantile(0.975, 60), 60, level), basis)


def drawn_cells(ax):
    """Rows of (column's place -> value) as they were drawn, from the top."""
    (cells,) = ax.collections
    rows = {}
    for path, value in zip(cells.get_paths(), cells.get_array(), strict=True):
        left, top = path.vertices.min(0)
        rows.setdefault(top, {})[round(left)] = float(value)
    return [rows[top] for top in sorted(rows)]


@pytest.mark.parametrize(("residual", "by"), [("block", "contribution"), ("full", "contribution"), ("full", "weight")])
def test_a_cell_stands_in_the_column_of_its_source(residual, by):
    example = inspection(residual, layers=3)
    with style.style():
        figure = patterns(example, by).figure
    columns = [source.name for source in shares(example).columns()]
    assert columns[0] == "embedding"
    assert ("partial" in columns) == (residual == "block")
    assert "partial" not in columns[:-1]
    attention, mlp = figure.axes[:2]
    assert example.routing is not None
    for ax, reads in ((attention, [0, 2, 4]), (mlp, [1, 3, 5, 6])):
        for read, cells in zip(reads, drawn_cells(ax), strict=True):
            expected = dict(zip(example.routing["sources"][read], example.routing[FIELD[by]][read], strict=True))
            assert {columns[c]: value for c, value in cells.items()} == pytest.approx(expected)


def test_several_reads_of_a_sublayer_have_tables_of_their_own():
    """Those of one source, the MLPs', say nothing beside them and are left out; the output's are below the last."""
    example = of_several_reads("muddformer", 4)
    with style.style():
        figure = patterns(example).figure
    tables = figure.axes[:4]
    assert [ax.get_title("left") for ax in tables] == [f"before attention, {way}" for way in WAYS]
    assert example.routing is not None
    for ax, way in zip(tables, WAYS):
        reads = [row for row, read in enumerate(example.layout) if read.into == way]
        for read, cells in zip([*reads, len(example.reads) - 1], drawn_cells(ax)):
            assert cells == pytest.approx(dict(enumerate(example.routing["weights"][read])))
        assert len(drawn_cells(ax)) == len(reads) + (way == "stream")


def test_several_reads_of_a_sublayer_stand_side_by_side_along_depth():
    example = of_several_reads("dca", 2)
    with style.style():
        ax = by_depth(models(example), ["input_rms"], "depth", "depth").figure.axes[0]
    line, attention, mlp, output = ax.get_lines()[:4]
    values, own = example.input_rms, [0, 0, 0, 1, 2, 2, 2, 3, 4]
    means = [np.mean([value for value, place in zip(values, own) if place == index]) for index in range(5)]
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4] and line.get_ydata().tolist() == pytest.approx(means)
    assert attention.get_xdata() == pytest.approx([-1 / 3, 0, 1 / 3, 2 - 1 / 3, 2, 2 + 1 / 3])
    assert attention.get_ydata() == pytest.approx([*values[0:3], *values[4:7]])
    assert (mlp.get_xdata().tolist(), output.get_xdata().tolist()) == ([1, 3], [4])


def test_reads_of_one_sublayer_count_as_one_in_a_layers_share():
    example = of_several_reads("muddformer", 2)
    rows = np.array(example.mixing)
    rows /= rows.sum(1, keepdims=True)
    one = [rows[0], rows[1], rows[2:6].mean(0), rows[6], rows[7]]
    reads = np.stack([(one[0] + one[1]) / 2, (one[2] + one[3]) / 2, one[4]])
    expected = np.stack([reads[:, 0], reads[:, 1] + reads[:, 2], reads[:, 3] + reads[:, 4]], 1)
    expected[0, 2] = np.nan
    np.testing.assert_allclose(layer_shares(example)[0], expected)
    with style.style():
        assert mixing(models(example)).figure.axes[0].get_ylim() == (8, 0)


@pytest.mark.quick("*-[12]")
@pytest.mark.parametrize(
    ("residual", "layers"), [("block", 1), ("full", 1), ("standard", 1), ("block", 2), ("full", 54)]
)
def test_every_depth_is_drawn(residual, layers):
    example = inspection(residual, layers, **({"example": None} if layers == 54 else {}))
    alone, beside = draw_model(example), draw_comparison(models(example))
    left_out = dict(alone.left_out)
    assert left_out["learned"] == "no gates or biases"
    assert {plot.name for plot in alone.plots} | set(left_out) == set(ALONE)
    assert {plot.name for plot in beside.plots} | {name for name, _ in beside.left_out} == set(BESIDE)
    if layers == 2 and residual == "block":
        assert set(left_out) == {"learned"} and not beside.left_out
    if residual == "standard":
        assert left_out["queries"] and dict(beside.left_out)["source-norms"]
        assert "tokens" not in left_out, "contributions differ from token to token where weights do not"
        assert dict(draw_model(example, "weight").left_out)["tokens"] == "its weights are the same for every token"


def test_no_two_names_beside_an_axis_overlap():
    """At 54 layers as at 12: neighbouring tick labels keep the height of their letters apart."""
    for layers in (12, 54):
        with style.style():
            figure = mixing(models(inspection("full", layers))).figure
            figure.draw_without_rendering()
        for ticks, side in ((figure.axes[0].get_yticklabels(), 1), (figure.axes[0].get_xticklabels(), 0)):
            boxes = sorted((label.get_window_extent() for label in ticks), key=lambda box: box.min[side])
            assert len(boxes) > 6
            assert all(a.max[side] <= b.min[side] + 0.5 for a, b in pairwise(boxes))


def test_the_last_name_is_always_shown():
    with style.style():
        figure = mixing(models(inspection("full", 12))).figure
    thin_ticks(figure.axes[0].yaxis, list(range(100)), [str(i) for i in range(100)], 2.0)
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()][-1] == "99"


def test_boundaries_are_the_reads_with_which_blocks_begin():
    block = shares(inspection("block", 6))
    assert [block.layout[row].name for row in boundaries(block)] == ["mlp 1", "attention 3", "mlp 4", "output"]
    with style.style():
        figure = at_boundaries(inspection("block", 6)).figure
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == [
        *("L1 MLP", "L3 attention", "L4 MLP", "output")
    ]
    full = shares(inspection("full", 20))
    assert len(boundaries(full)) == 7
    assert boundaries(full)[-1] == 40


def test_matrices_have_rows_that_sum_to_one_and_layers_hold_both_sublayers():
    example = inspection("full", 3)
    for by, raw in (("contribution", example.mixing_contribution), ("weight", example.mixing)):
        values, shown = layer_shares(example, by)
        assert shown == by and np.nansum(values, 1) == pytest.approx(np.ones(4))
        raw = np.array(raw)
        raw /= raw.sum(1, keepdims=True)
        assert values[2, 1] == pytest.approx((raw[4, 1:3].sum() + raw[5, 1:3].sum()) / 2)  # layer 2 reads layer 0
    assert values[3, 0] == pytest.approx(raw[6, 0])
    with style.style():
        figure = mixing(models(example, inspection("standard", 2), inspection("block", 2, mixing=None))).figure
    assert len([ax for ax in figure.axes if ax.get_title(loc="left")]) == 2


@pytest.mark.parametrize("by", ["contribution", "weight"])
def test_the_bars_of_a_token_sum_to_one(by):
    """What points against the read hangs below zero."""
    example = inspection("full", 8)
    with style.style():
        figure = stacked(example, by).figure
    heights = np.zeros(len(TOKENS))
    for container in figure.axes[0].containers:
        heights += [bar.get_height() for bar in container]
    assert heights == pytest.approx(np.ones(len(TOKENS)), abs=1e-5)
    below = [bar.get_height() for container in figure.axes[0].containers for bar in container if bar.get_height() < 0]
    assert bool(below) == (by == "contribution") and figure.axes[0].get_ylim()[0] <= min(below, default=0.0)


def test_the_token_map_colours_each_token_by_its_own_weight():
    example = inspection("block", 4)
    with style.style():
        figure = token_map(example, "weight").figure
        others = token_map(example).figure
    fragments, lines, _, shown = _layout(TOKENS)
    assert (lines, shown) == (3, len(TOKENS))
    assert [(line, start) for token, line, start, _ in fragments if TOKENS[token] in ("return", "\u4e2d")] == [
        (1, 4),
        (2, 0),
    ]
    last = next(ax for ax in figure.axes if ax.get_title(loc="left").startswith("out"))
    assert example.example is not None
    weights = np.array([row[0] for row in example.example["weights"][-1]])
    patches = sorted(range(len(fragments)), key=lambda i: weights[fragments[i][0]])
    darkness = [sum(last.patches[i].get_facecolor()[:3]) for i in patches]
    assert darkness == sorted(darkness, reverse=True)
    parts = np.array(example.example["contribution"][-1])
    place = parts.std(0).argmax()
    last = others.axes[[ax.get_title(loc="left")[:3] for ax in others.axes].index("out")]
    assert f"← {example.layout[-1].sources[place].label}:" in last.get_title(loc="left")
    blue = [last.patches[i].get_facecolor()[2] - last.patches[i].get_facecolor()[0] for i in range(len(fragments))]
    signs = [parts[fragment[0], place] for fragment in fragments]
    assert all((tint > 0) == (value > 0) for tint, value in zip(blue, signs) if abs(value) > 0.1)


def test_long_lines_and_letters_without_a_glyph_are_drawn():
    fragments, lines, letters, shown = _layout(["x" * 200, "\n", "y"])
    assert (lines, letters, shown) == (4, 68, 3)
    assert "".join(text for token, _, _, text in fragments if token == 0) == "x" * 200
    assert drawable("a\U0001f600\x07b") == "a··b"
    assert _layout(["a\n"] * 100)[3] < 100


def test_what_is_learned_besides_queries_is_drawn_by_what_its_axes_count():
    def panels(**tables):
        named = {name: dict(zip(("values", "axes", "title"), table)) for name, table in tables.items()}
        with style.style():
            return learned(inspection("full", 4, learned=named)).figure.axes

    def ticks(ax):
        return [[tick.get_text() for tick in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]

    line, cells, *_ = panels(
        mine=([[1.0, 2.0]] * 3, ["thing", "stream"], "what is mine"), gate=([0.5] * 9, ["read"], "share of the read")
    )
    assert (line.get_ylabel(), line.get_lines()[0].get_ydata().tolist()) == ("share of the read", [0.5] * 9)
    assert cells.get_title(loc="left") == "what is mine" and drawn_cells(cells) == [{0: 1.0, 1: 2.0}] * 3
    assert ticks(cells) == [["stream 0", "stream 1"], ["thing 0", "thing 1", "thing 2"]]
    mix = panels(mix=([[1.0] * 2 + [None] * 3, [1.0] * 3 + [None] * 2], ["layer", "source"], "coefficient"))[0]
    assert drawn_cells(mix) == [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}]
    assert ticks(mix)[0] == ["embedding", "layer 0", "layer 1", "layer 2", "layer 3"]
    assert ticks(panels(read=([[1.0, 0.0]] * 8, ["sublayer", "stream"], "reads"))[0])[1][:2] == [
        "L0 attention",
        "L0 MLP",
    ]
    (gates,) = panels(gates=([0.4, 0.1, 0.2], ["layer"], "gate"), temperature=(0.1, [], "temperature"))
    assert (gates.get_xlabel(), gates.get_ylabel(), len(gates.get_lines())) == ("layer", "gate", 1)
    assert gates.get_lines()[0].get_ydata().tolist() == [0.4, 0.1, 0.2]
    with pytest.raises(NotShown):
        panels(temperature=(0.1, [], "temperature"))


def test_files_are_whole_and_the_same_each_time(tmp_path):
    example = inspection("block", 2)
    kinds = ("pdf", "svg", "png")
    for folder in ("a", "b"):
        with style.style():
            plot = at_boundaries(example)
        save_all([plot], tmp_path / folder, kinds)
    first = sorted((tmp_path / "a").iterdir())
    assert [path.name for path in first] == [f"boundaries.{kind}" for kind in sorted(kinds)]
    for path in first:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert (tmp_path / "a" / "boundaries.pdf").read_bytes().startswith(b"%PDF")
    assert not re.search(r"\b20\d\d-\d\d-\d\d", (tmp_path / "a" / "boundaries.svg").read_text())


def test_all_figures_of_a_model_are_written(tmp_path):
    bare = {"kinds": None, "example": None, "query_cosine": None}
    written = write_figures(inspection("block", 1, **bare), tmp_path, ("svg",))
    assert {path.stem for path in written} == {
        *("patterns", "boundaries", "mixing", "layers", "depth", "magnitudes", "source-norms", "keys")
    }
    assert sorted(written) == sorted(tmp_path.iterdir())


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="unknown image format 'gif'"):
        write_figures(inspection(layers=1), tmp_path, ("gif",))
    assert not list(tmp_path.iterdir())


def test_several_models_are_set_side_by_side():
    drawn = draw_comparison(models(inspection("standard", 4), inspection("block", 4), inspection("full", 2)))
    assert [plot.name for plot in drawn.plots] == [f"compare-{name}" for name in BESIDE]
    assert not drawn.left_out


def test_dynamics_hold_what_the_runs_recorded():
    rows = {"steps": [10, 20], "output_rms": [[1.0, 2.0], [3.0, 4.0]], "grad_rms": [[0.1, 0.2], [0.3, 0.4]]}
    runs = [
        variant("standard", "standard", held_out={0: [(10, 3.0), (20, 2.5)]}, dynamics={0: rows}),
        variant("full", "full", held_out={0: [(10, 2.9), (20, 2.4)]}),
    ]
    drawn = draw_comparison(Comparison(runs))
    assert [plot.name for plot in drawn.plots] == ["held-out-loss", "dynamics", "dynamics-steps"]
    loss, output, gradient = drawn.plots[1].figure.axes
    lines = {line.get_label(): line.get_ydata().tolist() for line in loss.get_lines()}
    assert lines == {"standard": [3.0, 2.5], "full": [2.9, 2.4]}
    assert output.get_lines()[0].get_ydata().tolist() == [3.0, 4.0]
    assert gradient.get_lines()[0].get_ydata().tolist() == [0.3, 0.4]
    assert draw_comparison(Comparison([variant("full", "full")])).plots == []


def test_several_seeds_are_a_line_at_their_mean_in_a_band_from_least_to_most():
    seeds = {seed: inspection("full", 2, sharpness=[0.0, seed, 2.0 * seed, 1.0, 1.0]) for seed in (1, 3)}
    with style.style():
        ax = by_depth(Comparison([variant("full", "full", (1, 3), seeds)]), ("sharpness",), "x", "y").figure.axes[0]
    assert ax.get_lines()[0].get_ydata().tolist() == [0.0, 2.0, 4.0, 1.0, 1.0]
    band = ax.collections[0].get_paths()[0].vertices
    assert [band[band[:, 0] == 2][:, 1].min(), band[band[:, 0] == 2][:, 1].max()] == [2.0, 6.0]


def test_depth_is_numbered_by_layers():
    figure = by_depth(models(inspection("full", 12)), ("output_rms", "input_rms"), "x", "y").figure
    outputs, reads = figure.axes
    assert [outputs.get_xlabel(), reads.get_xlabel()] == ["layer", "layer that reads"]
    for ax in (outputs, reads):
        numbered = [(t.get_text(), x) for t, x in zip(ax.get_xticklabels(), ax.get_xticks()) if t.get_text() != "out"]
        assert len(numbered) > 4 and all(x == 2 * int(text) for text, x in numbered), "a layer's attention"
    assert reads.get_xticks()[-1] == 24 and reads.get_xticklabels()[-1].get_text() == "out"


def test_each_variant_has_the_most_sources_that_its_reads_can_have():
    pair = models(inspection("full", 2), inspection("block", 2))
    plot = by_depth(pair, ("effective",), "x", "y")
    dotted = [line for line in plot.figure.axes[0].get_lines() if line.get_linestyle() == ":"]
    assert [line.get_ydata().tolist() for line in dotted] == [one.mean.entropy["most"] for one in pair.variants]
    assert [line.get_color() for line in dotted] == [look["color"] for look in pair.looks()]
    assert "Dotted: as many sources as a read has" in plot.caption


def test_what_a_read_cannot_see_is_hatched_by_lines_within_its_cells():
    """No pattern: browsers print one image for each use."""
    figure = Figure()
    values = np.array([[1.0, np.nan, np.nan], [np.nan, 2.0, np.nan]])
    with style.style():
        draw_cells(figure.subplots(), values)
    (line,) = figure.axes[0].get_lines()
    points = line.get_xydata().reshape(-1, 3, 2)
    assert np.isnan(points[:, 2]).all() and len(points) > 6
    for start, end in points[:, :2]:
        middle = (start + end) / 2
        assert np.isnan(values[int(middle[1]), int(middle[0])])
        assert end[0] - start[0] == pytest.approx(start[1] - end[1]) and 0 < end[0] - start[0] <= 1
    assert "<pattern" not in to_svg(figure, "x", "x", 1.0)


def test_lines_that_lie_on_one_another_are_named():
    same, other = inspection("full", 2, sharpness=[1.0, 2.0, 3.0, 4.0, 5.0]), inspection("full", 2, sharpness=[5.0] * 5)
    three = Comparison([variant(name, "full", (0,), {0: one}) for name, one in zip("abc", (same, other, same))])
    assert by_depth(three, ("sharpness",), "x", "y").caption.endswith(
        "a and c are the same line in 'sharpness |w g| √d'."
    )
    assert "same line" not in by_depth(models(same, other), ("sharpness",), "x", "y").caption


def test_a_quantity_that_is_not_listed_is_drawn_under_its_own_name():
    rows = {"steps": [10, 20], "output_rms": [[1.0] * 4, [3.0] * 4]}
    rows |= {"gates": [[0.4], [1e-9]], "of_reads": [[0.1] * 5, [0.3] * 5], "of_sublayers": [[0.1] * 4, [0.3] * 4]}
    with style.style():
        axes = over_steps(Comparison([variant("mine", "mine", dynamics={0: rows})])).figure.axes
    panels, bars = axes[:4], axes[4:]
    assert [ax.get_ylabel() for ax in panels] == ["layer"] * 4
    assert [ax.get_ylabel() for ax in bars] == ["RMS of outputs", "gate of a block's end", "of_reads", "of_sublayers"]
    assert panels[1].collections[0].norm(0.2) == pytest.approx(0.5), "gates are on a linear scale from 0"


def test_a_residual_that_weighs_nothing_says_so():
    example = inspection("standard", 2, routing=None, mixing=None)
    example.model["residual"] = "deepnorm"
    with pytest.raises(NotShown, match="deepnorm has no weights"), style.style():
        patterns(example)
    drawn = draw_comparison(models(example))
    assert {"depth", "magnitudes"} == {plot.name for plot in drawn.plots}
    assert names("full", 1)[-1] == ["embedding", "attention 0", "mlp 0"]


def test_a_row_of_dynamics_is_labelled_where_its_first_panel_is():
    """The first run lacks the gate: the second's panel names the row, and each column's last one its steps."""
    rows = {"steps": [10, 20], "output_rms": [[1.0, 2.0], [3.0, 4.0]]}
    gated = rows | {"gate": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]}
    with style.style():
        runs = [variant("standard", "standard", dynamics={0: rows}), variant("x" * 90, "full", dynamics={0: gated})]
        axes = over_steps(Comparison(runs)).figure.axes
    (first, second), (absent, gate) = axes[:2], axes[2:4]
    assert [ax.get_ylabel() for ax in (first, second, absent, gate)] == ["layer", "", "", "layer"]
    assert not absent.axison
    assert [ax.get_xlabel() for ax in (first, second, gate)] == ["step", "", "step"]
    assert gate.yaxis.get_tick_params()["labelleft"]
    assert gate.get_ylim() == (2.5, -0.5), "read 2 stands at 2"
    assert gate.collections[0].get_array()[1].tolist() == [0.2, 0.5]
    assert max(map(len, second.get_title(loc="left").split("\n"))) < 60


@pytest.mark.long
def test_long_names_leave_room_for_the_plots():
    shown = [inspection(residual, 1) for residual in ("standard", "block", "full")]
    for i, seen in enumerate(shown):
        seen.model["name"] = f"{i}-" + "a-very-long-name-of-a-model" * 3
    for plot in draw_comparison(models(*shown)).plots:
        plot.figure.draw_without_rendering()  # a layout that fails warns
        panels = [ax for ax in plot.figure.axes if ax.get_label() != "<colorbar>"]
        assert all(ax.get_window_extent().width > 80 for ax in panels)
        assert all(ax.get_tightbbox().y1 <= plot.figure.bbox.y1 + 1 for ax in panels)


def test_lines_of_every_two_residuals_differ():
    names = list(RESIDUALS)
    looks = style.looks({name: (name, traits_of(name)) for name in names}).values()
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(names)
    again = style.looks({label: ("full", traits_of("full")) for label in "ab"})
    assert again["a"]["linestyle"] != again["b"]["linestyle"]
    many = style.looks({label: ("full", traits_of("full")) for label in "abcdefghi"}).values()
    assert len({(look["color"], str(look["linestyle"])) for look in many}) == 9
    mine = traits_of("full")._replace(colour="#123456"), traits_of("full")._replace(colour="red;}")
    colours = [look["color"] for look in style.looks(dict(zip("ab", (("mine", traits) for traits in mine)))).values()]
    assert colours == ["#123456", style.OTHERS[0]]


def test_points_far_from_zero_are_not_cut():
    with style.style():
        example = inspection("full", 2, sharpness=[20.0, 21.0, 22.0, 20.5, 21.5])
        figure = by_depth(models(example), CHOICE, "depth", "reads").figure
        kinds = by_kind(inspection("full", 2), "weight").figure
        signed = by_kind(inspection("full", 2)).figure
    for ax in figure.axes:
        assert ax.get_ylim()[1] > 1.02 * max(
            np.nanmax(line.get_ydata()) for line in ax.get_lines() if len(line.get_ydata())
        )
    for ax in kinds.axes:
        points = ax.containers[0].lines[0].get_xdata()
        assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 1.1 * max(points)
    for ax in signed.axes:
        points = ax.containers[0].lines[0].get_xdata()
        assert ax.get_xlim()[0] <= 1.1 * min(0, *points) and ax.get_xlim()[1] >= max(0, *points)


def test_a_network_whose_output_has_one_source_shows_its_last_mix():
    example = inspection("full", 2)
    for part in (
        example.routing["sources"],
        example.routing["weights"],
        *example.kinds["weights"],
        *example.kinds["error"],
    ):
        part[-1] = part[-1][:1]
    for part in (example.routing["contribution"], *example.kinds["contribution"], *example.kinds["contribution_error"]):
        part[-1] = part[-1][:1]
    example.example["weights"][-1] = [[1.0] for _ in TOKENS]
    with style.style():
        assert "'mlp 1'" in stacked(example).caption
        assert "'mlp 1'" in label_sources(example).caption


def test_kinds_are_held_against_their_own_tokens():
    """In a report routing is the mean over seeds and kinds are the first seed's."""
    example = inspection("full", 3)
    values = {}
    for shift in (0.0, 0.3):
        moved = copy.deepcopy(example)
        for row in moved.routing["contribution"]:
            row[0] += shift
        with style.style():
            (mesh,) = (one for one in label_sources(moved).figure.axes[0].collections if one.get_array() is not None)
            values[shift] = np.asarray(mesh.get_array())
    np.testing.assert_allclose(values[0.3], values[0.0])


def test_the_scale_reaches_as_far_down_as_any_panel():
    figure, axes = canvas(PAGE, 2.0, 1, 2)
    tables = [np.array([[value, 0.5]]) for value in (-0.6, 0.1)]
    look = look_of("contribution", *tables)
    for ax, table in zip(axes[0], tables):
        mesh = draw_cells(ax, table, **look)
    scale(figure, mesh, list(axes[0]), "share")
    assert figure.axes[-1].get_ylim()[0] == -1.0


def shown_ticks(axis):
    """The numbers on an axis that lie within it."""
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    return [text.get_text() for place, text in ticks if low - 1e-9 <= place <= high + 1e-9]


def test_the_scale_holds_the_largest_contribution_of_all_panels():
    example = inspection("full", 3)
    assert example.routing is not None
    example.routing["contribution"][4] = [2.4, -1.6, 0.1, 0.1, 0.0]  # before attention
    example.routing["contribution"] = [np.clip(row, -2.4, 2.4).tolist() for row in example.routing["contribution"]]
    with style.style():
        figure = patterns(example).figure
        figure.draw_without_rendering()
    attention, mlp, bar = figure.axes
    assert [ax.collections[0].norm.vmax for ax in (attention, mlp)] == [2.4, 2.4]
    assert bar.get_ylim()[1] == 2.4 and shown_ticks(bar.yaxis)[-3:] == ["0.24", "1.2", "2.4"]
    small = inspection("full", 1, routing=example.routing | {"contribution": [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]]})
    small.routing |= {"sources": names("full", 1), "reads": small.reads, "weights": small.routing["contribution"]}
    assert patterns(small).figure.axes[0].collections[0].norm.vmax == 1.0


@pytest.mark.parametrize("pair", [(1.7, -0.7), (9.0, -8.0), (0.4, 0.6)])
def test_bars_below_zero_and_above_one_have_their_numbers(pair):
    example = inspection("full", 1)
    assert example.example is not None
    tokens = [[*pair[:: (-1) ** i]] for i in range(len(TOKENS))]
    example.example["contribution"][1:] = [tokens, [[*row, 0.0] for row in tokens]]
    with style.style():
        figure = stacked(example).figure
        figure.draw_without_rendering()
    ticks = [float(text.replace("−", "-")) for text in shown_ticks(figure.axes[0].yaxis)]
    assert 0.0 in ticks and 3 <= len(ticks) <= 7
    assert (min(ticks) < 0) == (min(pair) < 0) and (max(ticks) > 1) == (max(pair) > 1)


def test_a_number_that_is_none_leaves_the_others_their_scale():
    example = inspection("full", 2)
    assert example.example is not None

    def last(seen):
        with style.style():
            return next(ax for ax in token_map(seen, "weight").figure.axes if ax.get_title("left").startswith("out"))

    before = [patch.get_facecolor() for patch in last(example).patches]
    whole = max(row[0] for row in example.example["weights"][-1])
    place = next(i for i, row in enumerate(example.example["weights"][-1]) if row[0] < whole)
    example.example["weights"][-1][place] = [math.nan] * 5
    after = last(example)
    changed = [i for i, patch in enumerate(after.patches) if patch.get_facecolor() != before[i]]
    fragments = _layout(TOKENS)[0]
    assert {fragments[i][0] for i in changed} == {place}
    assert all(min(after.patches[i].get_facecolor()[:3]) > 0.9 for i in changed), "pale, not the largest"
    assert "–" in after.get_title("left")


@pytest.mark.long
def test_numbers_under_five_panels_keep_apart():
    """The last layer's from the word out too, whatever the depth."""
    for layers in (1, 4, 12, 24, 54):
        with style.style():
            figure = by_depth(models(inspection("full", layers)), CHOICE, "depth", "reads").figure
            figure.draw_without_rendering()
        assert len({round(ax.get_position().y0, 2) for ax in figure.axes}) == 2
        for ax in figure.axes:
            boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
            assert len(boxes) >= 2
            assert all(a.x1 + 1 < b.x0 for a, b in pairwise(boxes)), (layers, ax.get_ylabel())


def test_two_decades_have_the_same_numbers_everywhere():
    _, (ax,) = panels(1)
    ax.set_yscale("log")
    ax.set_ylim(0.04, 3)
    log_numbers(ax.yaxis, 0.04, 3)
    assert shown_ticks(ax.yaxis) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    ax.set_ylim(1e-6, 3e5)
    log_numbers(ax.yaxis, 1e-6, 3e5)
    assert shown_ticks(ax.yaxis)[:3] == ["1e−6", "1e−5", "0.0001"] and shown_ticks(ax.yaxis)[-1] == "100 k"
    ax.set_ylim(1.1, 1.9)
    log_numbers(ax.yaxis, 1.1, 1.9)
    assert len(shown_ticks(ax.yaxis)) >= 3


@pytest.mark.long
def test_a_long_text_on_many_boundaries_fits_a_page():
    example = inspection("full", 20)
    tokens = ["word\n"] * 60
    example.example |= {
        "tokens": tokens,
        **{
            name: [[row[i % 2] for i in range(60)] for row in example.example[name]]
            for name in ("weights", "contribution")
        },
    }
    with style.style():
        plot = token_map(example)
    assert plot.figure.get_figheight() < 9.5 and "the first 27 tokens" in plot.caption


def test_captions_say_what_is_shown():
    block, full, standard = (inspection(residual, 6) for residual in ("block", "full", "standard"))
    with style.style():
        assert "the reads with which blocks begin" in by_kind(block).caption
        assert "evenly chosen" in by_kind(full).caption and "blocks" not in by_kind(full).caption
        assert "Sharpness" in by_depth(models(full), CHOICE, "depth", "reads").caption
        assert "Sharpness" not in by_depth(models(standard), CHOICE, "depth", "reads").caption


def test_intervals_of_two_seeds_leave_the_lines_to_be_seen():
    """Student's t of one degree of freedom makes them tens of times as wide as the differences are."""
    block = variant("block", "block", differences=[differs(step, -0.06, 0.01) for step in (1, 2, 3)], complete=True)
    full = dataclasses.replace(
        block,
        label="full",
        residual="full",
        differences=[differs(step, -0.05, 0.8, "seeds") for step in (1, 2, 3)],
    )
    comparison = Comparison([variant("standard", "standard"), block, full], "standard")
    plot, last = loss_difference(comparison), final_difference(comparison)
    for low, high in (plot.figure.axes[0].get_ylim(), last.figure.axes[0].get_xlim()):
        assert -0.2 < low < -0.07 and 0 < high < 0.2
    assert "leave the axes" in plot.caption and "to the edge" in last.caption
    narrow = Comparison([variant("standard", "standard"), block], "standard")
    assert "leave the axes" not in loss_difference(narrow).caption
    assert "to the edge" not in final_difference(narrow).caption


def test_lines_that_begin_outside_the_axes_are_said_to():
    points = [differs(step, -2.0 if step == 1 else -0.06, 0.01) for step in range(1, 41)]
    for factor in (1, -1):
        early = [differs(one.place, factor * one.effect.difference, 0.01) for one in points]
        block = variant("block", "block", differences=early)
        comparison = Comparison([variant("standard", "standard"), block], "standard")
        assert "The steep start is cut off." in loss_difference(comparison).caption
        held_out = {0: [(one.place, 5 + one.effect.difference) for one in early]}
        below = Comparison([variant("full", "full", held_out=held_out)])
        assert held_out_loss(below).caption.endswith("The steep start is cut off.")
        assert "The steep start is cut off." in dynamics(below).caption
    block = variant("block", "block", differences=points[1:])
    calm = loss_difference(Comparison([variant("standard", "standard"), block], "standard"))
    assert "cut off" not in calm.caption
    late = {0: [(step, 5.0 if step < 40 else math.inf) for step in range(1, 41)]}
    assert "cut off" not in held_out_loss(Comparison([variant("full", "full", held_out=late)])).caption


@pytest.mark.long
def test_what_is_of_several_seeds_says_so_in_every_caption():
    rows = {"steps": [10, 20], "output_rms": [[1.0, 2.0], [3.0, 4.0]], "grad_rms": [[0.1, 0.2], [0.3, 0.4]]}

    def captions(seeds):
        points = {seed: [(10, 3.0 + seed), (20, 2.5)] for seed in seeds}
        full = variant("full", "full", seeds, dynamics=dict.fromkeys(seeds, rows), held_out=points, train=points)
        rates = [
            dataclasses.replace(full, label=f"full-{rate}", group="full", rate=rate, finals=[2.5] * len(seeds))
            for rate in (0.1, 0.2)
        ]
        drawn = draw_comparison(Comparison([full])) + draw_comparison(Comparison(rates))
        return {plot.name: plot.caption for plot in reversed(drawn.plots)}

    several, one = captions((0, 1)), captions((0,))
    assert set(several) == set(one) == {"held-out-loss", "train-loss", "dynamics", "dynamics-steps", "learning-rates"}
    thin, band = (
        "Thin lines are single seeds, the thick one their mean.",
        "Lines: means over seeds; bands: least to most.",
    )
    expected = {
        "held-out-loss": thin,
        "train-loss": thin,
        "dynamics": f"{thin} {band}",
        "dynamics-steps": "Mean over seeds 0 and 1.",
        "learning-rates": "Ticks: single seeds; points: their means.",
    }
    for name, words in expected.items():
        assert words in several[name] and not any(part in one[name] for part in (thin, band, "over seeds", "Ticks"))


def test_at_the_end_nothing_is_held_against_a_baseline_on_its_way():
    block = variant("block", "block", differences=[differs(1, -0.06, 0.01)], complete=True)
    standard = variant("standard", "standard", complete=True)
    assert final_difference(Comparison([standard, block], "standard")).figure.axes
    unfinished = dataclasses.replace(standard, complete=False)
    with pytest.raises(NotShown, match="no finished run that can be compared"):
        final_difference(Comparison([unfinished, block], "standard"))


def test_what_lies_below_zero_is_on_an_axis_from_zero():
    _, (ax,) = panels(1)
    ax.plot([1, 2], [-0.004, 1.0])
    from_zero(ax)
    low, high = ax.get_ylim()
    assert -0.01 < low < -0.004 and 1 < high < 1.1
    ax.plot([1, 2], [-0.5, 0.0])
    from_zero(ax)
    assert ax.get_ylim()[0] < -0.5


def test_what_chance_does_is_a_band_where_the_baseline_has_several_seeds():
    differences = [differs(step, -0.2, 0.05) for step in (1, 2, 3)]
    block = variant("block", "block", differences=differences)
    seeds = {0: [(1, 5.0), (2, 4.0), (3, 3.0)], 1: [(1, 5.2), (2, 4.0)], 2: [(1, 5.4), (2, 4.6), (3, 3.0)]}
    standard = variant("standard", "standard", held_out=seeds)
    comparison = Comparison([standard, block], "standard")
    places, deviations = zip(*comparison.noise(), strict=True)
    assert places == (1, 2)  # where every seed was measured
    assert deviations == pytest.approx([math.sqrt(2) * 0.2, math.sqrt(2) * math.sqrt(0.12)])
    plot = loss_difference(comparison)
    band = plot.figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(max(deviations)) and band.min() == pytest.approx(-max(deviations))
    assert "other seeds" in plot.caption
    alone = dataclasses.replace(standard, held_out={0: seeds[0]})
    assert "other seeds" not in loss_difference(Comparison([alone, block], "standard")).caption


def test_a_difference_is_told_by_the_reports_rule():
    """By Holm's level an interval may include 0 that at 95 % does not; without an error nothing is told."""
    standard = variant("standard", "standard")

    def filled(*differences):
        block = variant("block", "block", differences=differences)
        marks = final_difference(Comparison([standard, block], "standard")).figure.axes[0].get_lines()
        return marks[-1].get_markerfacecolor() != style.PAPER

    assert filled(differs(1, -0.06, 0.05)) and not filled(differs(1, -0.06, 0.07))
    assert not filled(differs(1, -0.06, 0.05, level=0.005))
    assert not filled(LossDifference(1, Effect(-0.06, math.nan, 0)))


# ------------------------------------------------------------------ on a sheet of one's own


def texts_outside(figure):
    """Texts of a figure that leave it, and titles of panels that run into one another, as drawn."""
    figure.set_dpi(200)
    FigureCanvasAgg(figure).draw()
    inside = figure.bbox.padded(2)
    texts = [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()]
    boxes = [(one.get_text(), one.get_window_extent()) for one in texts if not one.get_clip_on()]
    out = [text for text, box in boxes if not (inside.contains(*box.min) and inside.contains(*box.max))]
    titles = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()]
    titles = [ax._left_title.get_window_extent() for ax in figure.axes if ax.get_title("left")] + titles
    return out + ["titles" for i, one in enumerate(titles) for other in titles[:i] if one.overlaps(other)]


@pytest.mark.quick("3.3-8.0-block")
@pytest.mark.parametrize("residual", ["block", "full", "standard", "muddformer"])
@pytest.mark.parametrize(("width", "font"), [(None, None), (3.3, 8.0), (5.0, 10.0)])
def test_figures_have_the_width_and_the_letters_that_are_asked_for(residual, width, font):
    example = of_several_reads(residual, 4) if residual == "muddformer" else inspection(residual, 6)
    with style.style(width, font):
        drawn = draw_model(example) + draw_comparison(models(example))
    assert len(drawn.plots) > 3
    for plot in drawn.plots:
        assert not texts_outside(plot.figure), plot.name
        if width is not None:
            assert plot.figure.get_figwidth() == width, plot.name
            for ax in plot.figure.axes:
                sizes = {one.get_fontsize() for one in [*ax.get_xticklabels(), *ax.get_yticklabels()]}
                assert sizes <= {font, font - 1}, plot.name
    with style.style():
        assert patterns(inspection("block", 2)).figure.get_figwidth() == PAGE, "as before"
