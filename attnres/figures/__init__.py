"""Figures of what depth attention does, good enough for a paper: one style, vector and PNG, told apart by colour-blind
readers, and right where rows have different numbers of sources."""

from attnres.figures.plot import NotShown, Plot
from attnres.figures.write import draw_comparison, draw_dynamics, draw_model, save_all, write_figures

__all__ = ["NotShown", "Plot", "draw_comparison", "draw_dynamics", "draw_model", "save_all", "write_figures"]
