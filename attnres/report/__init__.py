"""Make a table, figures and one self-contained page from run folders on disk.

Nothing here trains or runs a model: `attnres.training` wrote everything that is shown.
"""

from attnres.report.runs import Run, Study, load_run, load_study

__all__ = ["Run", "Study", "load_run", "load_study"]
