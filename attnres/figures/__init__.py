"""Figures of what depth attention does, good enough for a paper: one style, vector and PNG, told apart by colour-blind
readers, and right where rows have different numbers of sources."""

import contextlib
import os
import sys

# A notebook tells the programs that it starts to draw with its own backend, which may not be installed for them:
# matplotlib would refuse to be imported, and figures in files need no backend.
if "matplotlib" not in sys.modules and (backend := os.environ.pop("MPLBACKEND", "")):
    import matplotlib

    os.environ["MPLBACKEND"] = backend
    with contextlib.suppress(ValueError):
        matplotlib.rcParams["backend"] = backend

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
