"""Curves of studies: what stands on their axes."""

import pytest

from attnres.figures import style
from lab.charts import Curves, Line


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


def test_amounts_on_an_axis_have_their_unit():
    line = Line("full", [0, 1_000_000, 2_500_000], [-0.5, 0.1, 0.2])
    with style.style():
        (ax,) = Curves("gap", "Gap", "", "tokens", "gap", {"": [line]}, zero=True).draw().figure.axes
    ax.figure.draw_without_rendering()
    assert {"0", "1 M", "2 M"} <= {text.get_text() for text in ax.get_xticklabels()}
    assert {"−0.4", "0", "0.2"} <= {text.get_text() for text in ax.get_yticklabels()}


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
