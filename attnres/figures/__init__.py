"""Figures of what depth attention does, good enough for a paper: one style, vector and PNG, told apart by colour-blind
readers, and right where rows have different numbers of sources."""

import os

try:
    import matplotlib  # noqa: F401
except ValueError:  # MPLBACKEND is a notebook's, which not every program that the notebook starts has: none is needed
    del os.environ["MPLBACKEND"]

from attnres.figures.comparison import Comparison, Variant
from attnres.figures.plot import NotShown, Plot
from attnres.figures.write import FIGURES, draw_comparison, draw_model, save_all, write_figures

__all__ = [
    "FIGURES",
    "Comparison",
    "NotShown",
    "Plot",
    "Variant",
    "draw_comparison",
    "draw_model",
    "save_all",
    "write_figures",
]
