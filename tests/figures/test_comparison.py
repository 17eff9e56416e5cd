"""Differences with their intervals: what stands on their axes."""

import math

import pytest

from attnres.figures import style
from attnres.figures.comparison import Differences, Interval


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


@pytest.mark.parametrize("margins", [(0.0, 0.0), (0.0, 1.0), (math.nan, math.inf), ()])
def test_differences_of_nothing_are_drawn_too(margins):
    rows = [Interval(name, 0.0, margin, False) for name, margin in zip("ab", margins)]
    with style.style():
        figure = Differences("none", "None", "", "difference", rows).draw().figure
    figure.canvas.draw()
    low, high = figure.axes[0].get_xlim()
    assert low < 0 < high
