"""Figures of what depth attention does, good enough for a paper: one style, vector and PNG, told apart by colour-blind
readers, and right where rows have different numbers of sources."""

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
