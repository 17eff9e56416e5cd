"""Charts of studies: what stands on their axes."""

import pytest

from attnres.figures import style
from attnres.figures.chart import Curves, Line


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
