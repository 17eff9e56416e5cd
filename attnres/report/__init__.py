"""From run folders on disk to a table, figures and one self-contained page.

Nothing here trains or runs a model: everything shown was written by `attnres.training` while it ran.
"""

from attnres.report.runs import Run, Study, load_run, load_study

__all__ = ["Run", "Study", "load_run", "load_study"]
