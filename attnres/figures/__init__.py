"""Draw figures of depth attention for papers: one style, vector and PNG, distinguishable by colour-blind readers, and
correct where rows have different numbers of sources."""

import contextlib
import os
import sys

# In a notebook the environment names the notebook's drawing backend, which may not be installed here: matplotlib would
# refuse to be imported. Figures in files need no backend.
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
