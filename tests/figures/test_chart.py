"""Charts of studies: what stands on their axes."""

import math

import pytest

from attnres.figures import style
from attnres.figures.chart import Curves, Differences, Interval, Line


@pytest.mark.parametrize("values", [(0.12, 0.2, 0.45), (1.1, 1.3, 1.9), (0.3, 4.0), (1e-3, 1e4), (2.0, 2.0)])
def test_a_logarithmic_axis_has_numbers_whatever_it_spans(values):
    line = Line("full", list(range(len(values))), values)
    with style.style():
        figure = Curves("growth", "Growth", "", "sublayer", "RMS", {"": [line]}, log_y=True).draw().figure
    figure.canvas.draw()
    (ax,) = figure.axes
    low, high = ax.get_ylim()
    inside = [text.get_text() for text in ax.get_yticklabels() if low <= text.get_position()[1] <= high]
    assert len([text for text in inside if text]) >= 2


def test_an_interval_of_two_seeds_that_lie_apart_hides_no_other_difference():
    rows = [Interval("block", -0.045, 0.033, True), Interval("full", -0.034, 0.033, True)]
    rows.append(Interval("dca", -0.042, 10.8, False))
    with style.style():
        plot = Differences("rivals", "Rivals", "", "difference", rows).draw()
    low, high = plot.figure.axes[0].get_xlim()
    assert -0.2 < low < -0.06 and 0 < high < 0.2
    assert "Bars to the edge go on" in plot.caption


def test_what_is_lower_is_blue_and_what_is_higher_orange_where_the_interval_excludes_0():
    rows = [Interval("a", -0.5, 0.1, True), Interval("b", 0.5, 0.1, True), Interval("c", 0.1, 0.1, False)]
    with style.style():
        plot = Differences("rivals", "Rivals", "What.", "difference", rows).draw()
    (ax,) = plot.figure.axes
    points = {line.get_xdata()[0]: line for line in ax.get_lines() if line.get_marker() == "o"}
    assert {x: line.get_color() for x, line in points.items()} == {-0.5: "#0072b2", 0.5: "#d55e00", 0.1: style.MUTED}
    assert points[0.1].get_markerfacecolor() == style.PAPER
    assert [text.get_text() for text in ax.get_yticklabels()] == ["b", "c", "a"], "from the bottom"


def test_amounts_on_an_axis_have_their_unit():
    line = Line("full", [0, 1_000_000, 2_500_000], [-0.5, 0.1, 0.2])
    with style.style():
        (ax,) = Curves("gap", "Gap", "", "tokens", "gap", {"": [line]}, zero=True).draw().figure.axes
    ax.figure.draw_without_rendering()
    assert {"0", "1 M", "2 M"} <= {text.get_text() for text in ax.get_xticklabels()}
    assert {"−0.4", "0", "0.2"} <= {text.get_text() for text in ax.get_yticklabels()}


@pytest.mark.parametrize("margins", [(0.0, 0.0), (0.0, 1.0), (math.nan, math.inf), ()])
def test_differences_of_nothing_are_drawn_too(margins):
    rows = [Interval(name, 0.0, margin, False) for name, margin in zip("ab", margins)]
    with style.style():
        figure = Differences("none", "None", "", "difference", rows).draw().figure
    figure.canvas.draw()
    low, high = figure.axes[0].get_xlim()
    assert low < 0 < high


@pytest.mark.parametrize(
    "labels", [["block"], ["standard", "full", "block"], ["full-weightssigmoid", "block, own parameters"]]
)
def test_a_mechanism_has_one_colour_in_all_charts(labels):
    own = {"standard": "#4a5260", "block": "#0072b2", "full": "#d55e00"}
    lines = [Line(label, [1, 2], [1, 2]) for label in labels]
    with style.style():
        figure = Curves("loss", "Loss", "", "steps", "loss", {"": lines}).draw().figure
    expected = [own[next(name for name in own if label.startswith(name))] for label in labels]
    assert [line.get_color() for line in figure.axes[0].get_lines()] == expected
